"""Counter-based random numbers: fixed for ever, uniform, independent of each other."""

import warnings

import numpy as np
import pytest
from scipy import stats

from bert_fast.data.counter_random import CounterRandom

LEAST_P = 1e-4


def test_the_numbers_are_the_same_for_ever() -> None:
    draws = CounterRandom(0, 1, "masking")
    assert draws.bits(np.arange(3)).tolist() == [0xA10F82F47087DCA4, 0xC47BA25AC04D4247, 0x98FB2F0773C6ED91]
    assert draws.bits(2, 7) == 0xC6A888CCC87C5F34
    assert draws.uniform(5) == 0.97187442921603
    assert CounterRandom(-1).integers(10, np.arange(6)).tolist() == [4, 3, 8, 4, 4, 5]
    assert CounterRandom("a").permutation(8).tolist() == [3, 4, 2, 6, 1, 5, 7, 0]


def test_shapes_and_dtypes() -> None:
    draws = CounterRandom(1)
    rows, columns = np.arange(3)[:, None], np.arange(4)
    table = draws.bits(rows, columns)
    assert table.shape == (3, 4) and table.dtype == np.uint64
    assert table[2, 3] == draws.bits(2, 3) == draws.bits(np.uint64(2), np.int32(3))
    assert draws.bits().shape == draws.bits(5).shape == () and draws.bits(np.arange(0)).shape == (0,)
    assert draws.uniform(rows, columns).dtype == np.float64
    assert draws.integers(np.array([1, 2, 3, 2**32]), columns).dtype == np.int64
    assert draws.permutation(0).tolist() == [] and draws.permutation(1).tolist() == [0]
    counters = np.arange(4)
    draws.bits(counters)
    assert counters.tolist() == [0, 1, 2, 3]


def test_order_of_counters_and_every_part_of_the_key_count() -> None:
    keys = [(), (0,), (1,), (-1,), (2**64,), (2**70,), ("",), ("0",), ("1",), (0, 1), (1, 0), (1, "a"), ("a", 1),
            ("ab", "c"), ("a", "bc"), ("abc",), (1, 11), (11, 1), ("i", 1), ("\0",), ("\0", "")]  # fmt: skip
    assert len({int(CounterRandom(*key).bits(0)) for key in keys}) == len(keys)
    draws = CounterRandom()
    assert len({int(draws.bits(*counters)) for counters in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]}) == 7


def test_no_number_is_repeated_among_a_million() -> None:
    draws = CounterRandom(3, "x")
    assert len(np.unique(draws.bits(np.arange(1000)[:, None], np.arange(1000)))) == 1_000_000


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CounterRandom(2**80, "x").bits(2**63, 7)
        CounterRandom(0).integers(3, np.array([2**63 - 1]), 1)


def test_uniform_numbers_lie_below_one() -> None:
    found = CounterRandom(0).uniform(np.arange(100_000))
    assert 0 <= found.min() < 1e-4 and 1 - 1e-4 < found.max() < 1
    assert stats.kstest(found, "uniform").pvalue > LEAST_P


@pytest.mark.parametrize("shift", range(0, 64, 8))
def test_bytes_are_uniform(shift: int) -> None:
    for counters in ((np.arange(60_000),), (np.arange(300)[:, None], np.arange(200)), (7, np.arange(60_000) * 4096)):
        bytes_ = (CounterRandom(1, 2, "bytes").bits(*counters) >> np.uint64(shift)).ravel() & np.uint64(255)
        counts = np.bincount(bytes_.astype(np.int64), minlength=256)
        assert stats.chisquare(counts).pvalue > LEAST_P


def test_integers_are_uniform() -> None:
    for bound in (2, 3, 10, 1000):
        found = CounterRandom(4, "integers").integers(bound, np.arange(100_000))
        assert stats.chisquare(np.bincount(found, minlength=bound)).pvalue > LEAST_P
        assert found.max() == bound - 1 and found.min() == 0
    assert CounterRandom(0).integers(1, np.arange(100)).max() == 0
    assert CounterRandom(0).integers(2**32, np.arange(10_000)).max() > 2**31


def test_streams_seeds_epochs_and_neighbours_are_independent() -> None:
    """Joint counts of the top four bits of two numbers."""
    counters = np.arange(50_000)
    base = CounterRandom(1, 2, "a").bits(counters)
    others = [
        CounterRandom(1, 2, "b").bits(counters),
        CounterRandom(1, 3, "a").bits(counters),
        CounterRandom(2, 2, "a").bits(counters),
        CounterRandom(1, 2, "a").bits(counters + 1),
        CounterRandom(1, 2, "a").bits(counters, 0),
        base << np.uint64(32),
    ]
    top = (base >> np.uint64(60)).astype(np.int64)
    for other in others:
        joint = np.bincount(top * 16 + (other >> np.uint64(60)).astype(np.int64), minlength=256)
        assert stats.chisquare(joint).pvalue > LEAST_P


def test_permutations_are_uniform() -> None:
    found = [tuple(CounterRandom(seed, "order").permutation(4).tolist()) for seed in range(6000)]
    assert {tuple(sorted(one)) for one in found} == {(0, 1, 2, 3)}
    counts = [found.count(one) for one in set(found)]
    assert len(counts) == 24 and stats.chisquare(counts).pvalue > LEAST_P
    assert np.array_equal(np.sort(CounterRandom(1).permutation(10_000)), np.arange(10_000))
