"""Batches as the Trainer gets them: shared among processes, of data sets of features, made by workers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.data.batches import Batches, Source
from bert_fast.data.packed_collator import PackedCollator
from bert_fast.training.loading import PLACE, Features, batch_loader
from tests.training.toy import ToySource


@pytest.fixture(scope="module")
def batches() -> Batches:
    return Batches(ToySource(50), batch_size=8, shuffle=True, seed=3)  # 7 an epoch


def shares(batches: Batches, count: int, epoch: int = 0, **options: Any) -> Iterator[list[Any]]:
    """What all processes get, round by round."""
    loaders = [batch_loader(batches, rank, count, **options) for rank in range(count)]
    for loader in loaders:
        loader.set_epoch(epoch)  # type: ignore[attr-defined]
    assert {len(loader) for loader in loaders} == {-(-7 // count)}
    return map(list, zip(*loaders, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_batch_is_one_process_s_once(batches: Batches, count: int) -> None:
    for epoch in (0, 1):
        found = []
        for number, several in enumerate(shares(batches, count, epoch)):
            first = several[0][PLACE]
            assert first.turn == number * count and not first.is_spare
            for rank, batch in enumerate(several):
                place = batch[PLACE]
                expected = batches.batch(place.epoch, place.number)
                assert torch.equal(batch["input_ids"], expected["input_ids"])
                if place.is_spare:  # the round's first one again
                    assert number * count + rank >= 7 and place[:3] == first[:3]
                else:
                    assert place.turn == number * count + rank
                    found.append((place.epoch, place.number))
        assert found == [(epoch, number) for number in range(7)]


class Changing(ToySource):
    """Other sequences in each epoch."""

    def lengths(self, epoch: int) -> np.ndarray:
        return ToySource(50, epoch).lengths(0)

    def batch(self, epoch: int, indices: np.ndarray) -> Any:
        return ToySource(50, epoch).batch(0, indices)


def test_epochs_of_other_sizes_lose_no_batch() -> None:
    """A run's epochs go on where the last one ended, however many batches each epoch of the data has."""
    batches = Batches(Changing(), max_tokens=24, shuffle=True)
    per_epoch = len(batches.plan(0))
    assert len({len(batches.plan(epoch)) for epoch in range(6)}) > 1
    found = []
    for epoch in range(6):
        loader = batch_loader(batches, 0, 1)
        loader.set_epoch(epoch)  # type: ignore[attr-defined]
        found += [(batch[PLACE].epoch, batch[PLACE].number) for batch in loader]
    everything = [(epoch, number) for epoch in range(7) for number in range(len(batches.plan(epoch)))]
    assert found == everything[: 6 * per_epoch]


def test_the_random_generator_is_left_alone(batches: Batches) -> None:
    before = torch.get_rng_state()
    list(batch_loader(batches, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_make_the_same(batches: Batches) -> None:
    alone, shared = list(batch_loader(batches, 1, 2)), list(batch_loader(batches, 1, 2, num_workers=2))
    assert [batch[PLACE] for batch in alone] == [batch[PLACE] for batch in shared]
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(alone, shared, strict=True))


class Broken(ToySource):
    def batch(self, epoch: int, indices: Any) -> Any:
        raise OSError("x.tsv: line 7: is gone")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_goes_wrong_in_workers_arrives(num_workers: int) -> None:
    with pytest.raises(OSError, match=r"x\.tsv: line 7: is gone"):
        list(batch_loader(Batches(Broken(), batch_size=8), 0, 1, num_workers=num_workers))


class Many(list[Any]):
    """A data set that gives several examples at once."""

    asked = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked += 1
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [list, Many])
def test_features_are_a_source(kind: Any) -> None:
    dataset = kind({"input_ids": [2, *range(5, 5 + length), 3], "labels": length % 2} for length in (4, 1, 7, 2))
    source = Features(dataset, PackedCollator())
    assert isinstance(source, Source)
    assert source.lengths(0).tolist() == source.lengths(3).tolist() == [6, 3, 9, 4]
    batch = source.batch(0, np.array([2, 0]))
    expected = PackedCollator()([dataset[2], dataset[0]])
    assert batch.keys() == expected.keys()
    assert torch.equal(batch["input_ids"], expected["input_ids"]) and batch["labels"].tolist() == [1, 0]
    assert getattr(dataset, "asked", 1) == 1


def test_lengths_that_are_known_are_not_looked_for() -> None:
    source = Features([{}], PackedCollator(), lengths=[12])
    assert source.lengths(0).tolist() == [12] and source.lengths(0).dtype == np.int32
