"""`BatchLoader`: the batches of one process from any step on, made beside the training.

Micro-batch m of an epoch is the same whatever the number of processes; a step of `share` micro-batches for all of them
takes numbers s * share to s * share + share - 1, of which process r has every W-th:

    share 4, W = 2        step 0      step 1
    process 0             0, 2        4, 6
    process 1             1, 3        5, (7 is beyond the epoch's last)

Where an epoch ends within a step, a process that has no batch gets one that was there already, marked as spare: it
takes part in the exchange of gradients and counts for nothing.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bert_fast.data.batches import Batches
from bert_fast.data.read_ahead import ReadAhead
from bert_fast.tokenization.pack import PackedBatch

__all__ = ["BatchLoader", "MicroBatch", "Place", "Position"]

_AHEAD = 4  # batches made in advance: a step's, and what evens out long and short ones


@dataclass(frozen=True)
class Position:
    """Where a run is in its data: the next step is number `step` of `epoch`, both from 0."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Place:
    """Which micro-batch is meant.

    number: of the micro-batch in its epoch. is_last: of its step, in this process. is_spare: see above. epoch_steps:
    steps of its epoch.
    """

    epoch: int
    step: int
    number: int
    is_last: bool
    is_spare: bool
    epoch_steps: int


class MicroBatch(NamedTuple):
    """A batch, and where it comes from."""

    place: Place
    batch: PackedBatch


class BatchLoader:
    """Iterates over the micro-batches of a process, epoch after epoch without end, from a position on.

    batches: of all processes. share: micro-batches of a step, of all processes. rank, world_size: of this process.
    start: the first step. num_workers: processes that make batches; 0: a thread of this one. pin_memory: for copies to
    a GPU that nobody waits for.

    An error in the thread or a worker is raised where the batch is asked for. `close` ends thread and workers.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        share: int,
        rank: int = 0,
        world_size: int = 1,
        start: Position = Position(0, 0),
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self._batches, self._share, self._rank, self._world_size = batches, share, rank, world_size
        places = self._places(start)
        if num_workers:
            self._source: Any = _Workers(batches, places, num_workers, pin_memory)
        else:
            # NumPy and copies let the training run meanwhile.
            self._source = ReadAhead(_made(batches, places, pin_memory), _AHEAD, "bert_fast batches")

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        return next(self._source)

    def next_step(self) -> tuple[list[MicroBatch], float]:
        """(micro-batches of the next step, seconds waited for them)."""
        began = time.perf_counter()
        batches = [next(self)]
        while not batches[-1].place.is_last:
            batches.append(next(self))
        return batches, time.perf_counter() - began

    def close(self) -> None:
        """Ends what works beside the training."""
        self._source.close(wait=True)

    def _places(self, start: Position) -> Iterator[Place]:
        for epoch in itertools.count(start.epoch):
            num_batches = len(self._batches.plan(epoch))
            if not num_batches:
                raise ValueError(f"source: expected examples in every epoch, epoch {epoch} has none")
            epoch_steps = -(-num_batches // self._share)
            for step in range(start.step if epoch == start.epoch else 0, epoch_steps):
                first = step * self._share
                # Rounds in which any process has a batch; then all take part.
                rounds = range(first, min(first + self._share, num_batches), self._world_size)
                for begin in rounds:
                    number = begin + self._rank
                    is_last, is_spare = begin == rounds[-1], number >= num_batches
                    yield Place(epoch, step, number % num_batches, is_last, is_spare, epoch_steps)


def _made(batches: Batches, places: Iterator[Place], pin_memory: bool) -> Iterator[MicroBatch]:
    for place in places:
        batch = batches.batch(place.epoch, place.number)
        yield MicroBatch(place, _pinned(batch) if pin_memory else batch)


class _Workers:
    """Batches from processes, by a DataLoader over all epochs at once, so that its workers live as long as the run."""

    def __init__(self, batches: Batches, places: Iterator[Place], num_workers: int, pin_memory: bool) -> None:
        loader = torch.utils.data.DataLoader(
            _Made(batches),
            batch_size=None,
            sampler=places,  # asked for one at a time, never for its length
            num_workers=num_workers,
            prefetch_factor=max(2, _AHEAD // num_workers),
            generator=torch.Generator(),  # it would draw from the one that dropout draws from
        )
        self._pin_memory = pin_memory
        self._iterator: Any = iter(loader)

    def __next__(self) -> MicroBatch:
        place, batch = next(self._iterator)
        return MicroBatch(place, _pinned(batch) if self._pin_memory else batch)

    def close(self, wait: bool) -> None:
        if self._iterator is not None:
            self._iterator._shutdown_workers()
        self._iterator = None


class _Made(torch.utils.data.Dataset[tuple[Place, PackedBatch]]):
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, place: Place) -> tuple[Place, PackedBatch]:
        return place, self._batches.batch(place.epoch, place.number)


def _pinned(batch: PackedBatch) -> PackedBatch:
    pinned = {key: value.pin_memory() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    return PackedBatch(pinned)
