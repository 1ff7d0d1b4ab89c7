"""Budgets of CUDA graphs for the batches of a run: how few, how large, and what is wrong with sizes."""

import itertools
from typing import Any

import numpy as np
import pytest

from bert_fast.graphs import Budget, budgets_for


def filled_up(sizes: list[tuple[int, ...]], budgets: list[Budget]) -> float:
    """The share of the tokens of all budgets taken that no batch uses; every batch must fit."""
    taken = 0
    for tokens, *others in sizes:
        fitting = [
            budget.max_tokens
            for budget in budgets
            if budget.max_tokens >= tokens
            and all(limit >= other for limit, other in zip((budget.max_sequences, budget.max_labels or 0), others))  # noqa: B905
        ]
        assert fitting, f"{tokens} tokens fit into no budget"
        taken += min(fitting)
    return 1 - sum(size[0] for size in sizes) / taken


def drawn(kind: str, count: int) -> list[tuple[int, ...]]:
    """Sizes of random batches: (tokens, sequences, labels)."""
    generator = np.random.default_rng(count)
    tokens = {
        "uniform": generator.integers(1, 5000, count),
        "skewed": np.minimum(generator.pareto(1.5, count) * 100 + 1, 50_000).astype(int),
        "two kinds": generator.choice([100, 4000], count) + generator.integers(0, 10, count),
        "sums of many": generator.integers(5, 120, (count, 32)).sum(1),
    }[kind]
    return [(int(t), int(s), int(t) // 7) for t, s in zip(tokens, generator.integers(1, 40, count), strict=True)]


KINDS = ("uniform", "skewed", "two kinds", "sums of many")


@pytest.mark.parametrize("count", [2, 17, 128, 129, 3000])
@pytest.mark.parametrize("kind", KINDS)
def test_little_is_filled_up(kind: str, count: int) -> None:
    sizes = drawn(kind, count)
    budgets = budgets_for(sizes, 512, filler=0.1, most=32)
    assert filled_up(sizes, budgets) <= 0.1
    assert budgets == sorted(budgets, key=lambda budget: budget.max_tokens)
    tokens, sequences, labels = (max(column) for column in zip(*sizes, strict=True))
    assert budgets[-1] == Budget(tokens, sequences, 512, max(labels, 1))


@pytest.mark.parametrize("most", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_no_other_choice_is_better(kind: str, most: int) -> None:
    """Of all choices there are: none as good with fewer budgets, none better with as many."""
    sizes = drawn(kind, 9)
    budgets = budgets_for(sizes, 64, filler=0.05, most=most)
    totals = sorted({tokens for tokens, *_ in sizes})

    def best(count: int) -> float:
        choices = itertools.combinations(totals[:-1], count - 1)
        return min(1 - sum(s[0] for s in sizes) / sum(
            min(t for t in (*some, totals[-1]) if t >= size[0]) for size in sizes) for some in choices)  # fmt: skip

    needed = next((k for k in range(1, len(totals) + 1) if best(k) <= 0.05), len(totals))
    assert len(budgets) == min(needed, most)
    assert filled_up(sizes, budgets) == pytest.approx(best(len(budgets)))


def test_batches_alike_take_one() -> None:
    packed = [(tokens, 100 + tokens % 7) for tokens in range(16_000, 16_385)]
    assert budgets_for(packed, 512) == [Budget(16_384, 106, 512)]
    assert budgets_for([(100, 4)] * 50, 30) == budgets_for([(100, 4)], 30) == [Budget(100, 4, 30)]
    assert budgets_for([(1, 1, 0)], 1) == [Budget(1, 1, 1, max_labels=1)]


def test_larger_budgets_have_room_for_what_fits_into_smaller_ones() -> None:
    sizes = [(10, 9, 8), (100, 3, 7), (1000, 2, 20)]
    assert budgets_for(sizes, 16, filler=0) == [Budget(10, 9, 16, 8), Budget(100, 9, 16, 8), Budget(1000, 9, 16, 20)]


def test_no_more_than_asked_for() -> None:
    sizes = drawn("uniform", 500)
    by_number = {most: budgets_for(sizes, 64, filler=0, most=most) for most in (1, 4, 8)}
    assert {most: len(budgets) for most, budgets in by_number.items()} == {1: 1, 4: 4, 8: 8}
    shares = [filled_up(sizes, budgets) for budgets in by_number.values()]
    assert shares[0] > 2 * shares[1] > 3 * shares[2] > 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"sizes": []}, ValueError, "sizes: expected at least one batch, got none"),
        ({"sizes": 3}, TypeError, "sizes: expected a list of tuples, got int"),
        ({"sizes": [3]}, TypeError, r"sizes\[0\]: expected \(tokens, sequences\[, labels\]\), got int"),
        ({"sizes": [(3,)]}, ValueError, r"sizes\[0\]: expected 2 or 3 numbers, as many as in sizes\[0\], got 1"),
        ({"sizes": [(3, 1), (3, 1, 1)]}, ValueError, r"sizes\[1\]: expected 2 or 3 numbers, .* got 3"),
        ({"sizes": [(3, 1), (0, 1)]}, ValueError, r"sizes\[1\]\[0\]: expected at least 1, got 0"),
        ({"sizes": [(3, 1.5)]}, TypeError, r"sizes\[0\]\[1\]: expected an int, got float"),
        ({"max_seqlen": 0}, ValueError, "max_seqlen: expected at least 1, got 0"),
        ({"filler": 1}, ValueError, "filler: expected a share from 0, below 1, got 1"),
        ({"filler": "x"}, TypeError, "filler: expected a number, got str"),
        ({"most": 0}, ValueError, "most: expected at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        budgets_for(**{"sizes": [(3, 1)], "max_seqlen": 4, **changes})
