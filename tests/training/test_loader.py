"""The batches of a process: from any step on, whoever makes them."""

import itertools
import pickle
import threading

import numpy as np
import pytest
import torch

from bert_fast.data.batches import Batches
from bert_fast.training.loader import BatchLoader, Place, Position
from tests.training.toy import ToySource


def taken(count: int, source=None, **arguments) -> list[tuple[Place, list[int]]]:
    """The first micro-batches: where they come from, and their tokens."""
    batches = Batches(source or ToySource(50), batch_size=4, seed=3)
    loader = BatchLoader(batches, **arguments)
    try:
        return [(place, batch["input_ids"].tolist()) for place, batch in itertools.islice(loader, count)]
    finally:
        loader.close()


def test_every_micro_batch_once_in_order() -> None:
    found = taken(26, share=1)
    assert [(place.epoch, place.number) for place, _ in found] == [(e, n) for e in range(2) for n in range(13)]
    assert all(place.is_last and not place.is_spare and place.epoch_steps == 13 for place, _ in found)
    first, second = (sorted(itertools.chain(*(ids for _, ids in found[i : i + 13]))) for i in (0, 13))
    assert first == second == sorted(np.concatenate(ToySource(50).sequences).tolist())
    assert [ids for _, ids in found[:13]] != [ids for _, ids in found[13:]], "epochs are shuffled anew"


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("num_workers", [1, 4])
def test_workers_change_nothing(num_workers) -> None:
    assert taken(30, share=2, num_workers=num_workers) == taken(30, share=2)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_share_the_steps(world_size) -> None:
    alone = {(place.epoch, place.number): ids for place, ids in taken(39, share=1)}
    together: dict[tuple[int, int], list[int]] = {}
    per_rank = []
    for rank in range(world_size):
        found = taken(3 * -(-13 // world_size), share=world_size, rank=rank, world_size=world_size)
        per_rank.append([(place.epoch, place.step, place.is_last) for place, _ in found])
        for place, ids in found:
            assert ids == alone[place.epoch, place.number]
            if not place.is_spare:
                assert (place.epoch, place.number) not in together, "made twice"
                together[place.epoch, place.number] = ids
    assert together == alone
    assert all(steps == per_rank[0] for steps in per_rank), "every process takes part in every step"


def test_a_step_of_several_micro_batches() -> None:
    # 13 micro-batches, 4 a step, two processes: the last step has one left, and the second process a spare one.
    first = [(p.step, p.number, p.is_last, p.is_spare) for p, _ in taken(7, share=4, rank=0, world_size=2)]
    second = [(p.step, p.number, p.is_last, p.is_spare) for p, _ in taken(7, share=4, rank=1, world_size=2)]
    assert first == [
        (0, 0, False, False), (0, 2, True, False), (1, 4, False, False), (1, 6, True, False),
        (2, 8, False, False), (2, 10, True, False), (3, 12, True, False),
    ]  # fmt: skip
    assert second[:6] == [(step, number + 1, last, spare) for step, number, last, spare in first[:6]]
    assert second[6] == (3, 0, True, True)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_step_can_be_the_first(num_workers) -> None:
    whole = taken(40, share=2)
    for epoch, step in ((0, 0), (0, 3), (0, 6), (1, 0), (1, 5)):
        place = next(i for i, (p, _) in enumerate(whole) if (p.epoch, p.step) == (epoch, step))
        assert taken(5, share=2, start=Position(epoch, step), num_workers=num_workers) == whole[place : place + 5]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_arrive_where_the_batch_is_asked_for(num_workers) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        taken(13, FailingSource(50), share=1, num_workers=num_workers)


class FailingSource(ToySource):
    def batch(self, epoch, indices):
        if 13 in indices:
            raise OSError("the disk is gone")
        return super().batch(epoch, indices)


def test_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    for num_workers in (0, 1):
        taken(5, share=1, num_workers=num_workers)
    assert torch.equal(torch.get_rng_state(), before)


def test_closing_ends_the_thread_at_once() -> None:
    def running() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "bert_fast batches"]

    loader = BatchLoader(Batches(ToySource(50), batch_size=4), share=1)
    next(loader)
    assert len(running()) == 1
    loader.close()
    assert running() == []


def test_an_epoch_without_examples_is_an_error() -> None:
    class Source(ToySource):
        def lengths(self, epoch):
            return super().lengths(epoch) if epoch < 1 else np.zeros(0, dtype=np.int32)

    with pytest.raises(ValueError, match="epoch 1 has none"):
        taken(14, Source(50), share=1)


def test_places_travel() -> None:
    place = Place(1, 2, 3, True, False, 9)
    assert pickle.loads(pickle.dumps(place)) == place
