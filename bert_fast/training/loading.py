"""Batches as a DataLoader of transformers' Trainer gives them: the same whatever the number of processes and workers.

Batch number m of an epoch goes to process m modulo their number. Where the last round has fewer batches than processes,
the others get the round's first one again, marked as spare: it takes part in the exchange of gradients and counts for
nothing.

    3 batches, 2 processes    round 0    round 1
    process 0                 0          2
    process 1                 1          (2)
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from bert_fast.data.batches import Batches, only

PLACE = "place"  # the entry of a batch that is taken out before a model sees it


class Place(NamedTuple):
    """Which batch is meant: `number` of `epoch` of the data. turn: its number in the epoch of the run."""

    epoch: int
    number: int
    turn: int
    is_spare: bool


class Features:
    """A data set of single examples with input_ids, as a tokenizer returns them, as a `Source`.

    Args:
        dataset: with `len` and indices.
        collate: joins a list of examples to a batch, as `PackedCollator` does.
        lengths (int [n]): tokens of every example; None: each is looked at once.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Mapping[str, Any]], lengths: Sequence[int] | None = None
    ) -> None:
        self.dataset, self.collate = dataset, collate
        if lengths is None and "input_ids" in (getattr(dataset, "column_names", None) or ()):
            lengths = [len(ids) for ids in dataset["input_ids"]]
        elif lengths is None:
            lengths = [len(dataset[index]["input_ids"]) for index in range(len(dataset))]
        self._lengths = np.asarray(lengths, dtype=np.int32)

    def lengths(self, epoch: int) -> np.ndarray:
        """See `Source.lengths`."""
        return self._lengths

    def batch(self, epoch: int, indices: np.ndarray) -> Any:
        """See `Source.batch`."""
        several = getattr(self.dataset, "__getitems__", None)
        wanted = indices.tolist()
        return self.collate(several(wanted) if several else [self.dataset[index] for index in wanted])


def batch_loader(batches: Batches, rank: int, count: int, **options: Any) -> "DataLoader[Any]":
    """A loader of the batches of one of `count` processes; each has a `Place` under `PLACE`.

    options: of `DataLoader`: num_workers and kin.
    """
    # Its own generator: an epoch's start must draw nothing from the one that dropout draws from.
    return _Loader(
        _Made(batches), batch_sampler=_Places(batches, rank, count), collate_fn=only, generator=torch.Generator(),
        **options,
    )  # fmt: skip


class _Places(Sampler[list[Place]]):
    """An epoch of the run has as many batches as the first of the data, so that a run knows its steps beforehand.

    Later epochs of the data may have some batches more or fewer: batches are counted through all of them, and none is
    left out.
    """

    def __init__(self, batches: Batches, rank: int, count: int) -> None:
        self.batches, self.rank, self.count, self.epoch = batches, rank, count, 0
        self.num_batches = len(batches.plan(0))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.num_batches // self.count)

    def __iter__(self) -> Iterator[list[Place]]:
        for first in range(0, self.num_batches, self.count):
            is_spare = first + self.rank >= self.num_batches
            turn = first if is_spare else first + self.rank
            yield [Place(*self.batches.locate(self.epoch * self.num_batches + turn), turn, is_spare)]


class _Made(Dataset[Any]):
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches.source.lengths(0))

    def __getitem__(self, place: Place) -> Any:
        # A collator of features may draw random numbers.
        seed = (self.batches.seed * 1_000_003 + place.epoch) * 1_000_003 + place.number
        with _chance(seed) if isinstance(self.batches.source, Features) else contextlib.nullcontext():
            batch: Any = self.batches.batch(place.epoch, place.number)
        batch[PLACE] = place
        return batch


@contextlib.contextmanager
def _chance(seed: int) -> Iterator[None]:
    """Seeds PyTorch's, Python's and NumPy's generators, and restores their states at the end."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


class _Loader(DataLoader[Any]):
    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
