"""Budgets: the most that a batch may hold, and which of them suit the batches of a run."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bert_fast.checks import check_count, check_number

_CANDIDATES = 64  # of each kind: sizes that budgets may have, of thousands of batches


@dataclass(frozen=True)
class Budget:
    """The most that a batch may hold; one graph is captured for each.

    Args:
        max_tokens: of all sequences together.
        max_sequences: their number.
        max_seqlen: tokens of the longest.
        max_labels: entries of masked_lm_positions, for batches that have it.

    Example:
        >>> graphs.Budget(max_tokens=4096, max_sequences=32, max_seqlen=128).max_tokens
        4096
    """

    max_tokens: int
    max_sequences: int
    max_seqlen: int
    max_labels: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_sequences", "max_seqlen", "max_labels"):
            value = getattr(self, name)
            if value is None and name == "max_labels":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")

    @property
    def num_slots(self) -> int:
        """Sequences of a full buffer: those of the batch and as many as tokens that it does not use may need."""
        return self.max_sequences + math.ceil(self.max_tokens / self.max_seqlen)

    def reasons_against(self, batch: Mapping[str, Any]) -> list[str]:
        """What of the batch is too large, as sentences; empty where it fits. No device sync."""
        sizes = {
            "max_tokens": ("tokens", num_tokens(batch)),
            "max_sequences": ("sequences", len(batch["cu_seqlens"]) - 1),
            "max_seqlen": ("tokens a sequence", batch["max_seqlen"]),
        }
        if "masked_lm_positions" in batch:
            sizes["max_labels"] = ("labels", len(batch["masked_lm_positions"]))
        return [
            f"{name}: expected at most {getattr(self, name)} {what}, got {size}"
            for name, (what, size) in sizes.items()
            if getattr(self, name) is None or size > getattr(self, name)
        ]


def budgets_for(sizes: Sequence[Sequence[int]], max_seqlen: int, filler: float = 0.05, most: int = 8) -> list[Budget]:
    """The fewest budgets in which batches of these sizes fill little up, by max_tokens; each batch fits into one.

    Args:
        sizes: (tokens, sequences) of every batch, or (tokens, sequences, entries of masked_lm_positions).
        max_seqlen: of every budget.
        filler: tokens that are filled up, as a share of those of the budgets that all batches take: at most this,
            unless `most` budgets leave more.
        most: number of budgets.

    Returns:
        The budgets (list of `Budget`), by max_tokens.

    The last budget is as large as the largest batch. A larger budget has room for the sequences and labels of all
    batches with fewer tokens. No other choice is better; of batches of more than 128 sizes, no other among so many
    (half of them quantiles of the batches, half evenly apart on a logarithmic scale).

    Raises:
        TypeError, ValueError: the message names the argument.

    Example:
        >>> budgets = graphs.budgets_for([(100, 4), (120, 4), (1000, 30)], max_seqlen=128)
        >>> [budget.max_tokens for budget in budgets]
        [120, 1000]
    """
    batches = _checked_sizes(sizes)
    max_seqlen, most = check_count("max_seqlen", max_seqlen, 1), check_count("most", most, 1)
    if not 0 <= check_number("filler", filler) < 1:
        raise ValueError(f"filler: expected a share from 0, below 1, got {filler}")
    totals = sorted(tokens for tokens, *_ in batches)
    candidates = sorted(set(totals))
    if len(candidates) > 2 * _CANDIDATES:
        last, growth = len(totals) - 1, totals[-1] / totals[0]
        shares = [place / _CANDIDATES for place in range(1, _CANDIDATES + 1)]
        below = (bisect_right(totals, totals[0] * growth**share) - 1 for share in shares[:-1])
        candidates = sorted({totals[place] for place in (*below, *(round(last * share) for share in shares))})
    enough = sum(totals) / (1 - filler) * (1 + 1e-12)  # tokens of all budgets taken; the rest is rounding
    chosen = _chosen(candidates, [bisect_right(totals, candidate) for candidate in candidates], most, enough)
    budgets = []
    for limit in chosen:
        within = [one for one in batches if one[0] <= limit]
        sequences, *labels = (max(one[place] for one in within) for place in range(1, len(batches[0])))
        budgets.append(Budget(limit, sequences, max_seqlen, *(max(count, 1) for count in labels)))
    return budgets


def _checked_sizes(sizes: Any) -> list[tuple[int, ...]]:
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise TypeError(f"sizes: expected a list of tuples, got {type(sizes).__name__}")
    if not sizes:
        raise ValueError("sizes: expected at least one batch, got none")
    batches = []
    for number, size in enumerate(sizes):
        if isinstance(size, str) or not isinstance(size, Sequence):
            raise TypeError(f"sizes[{number}]: expected (tokens, sequences[, labels]), got {type(size).__name__}")
        if len(size) not in (2, 3) or len(size) != len(sizes[0]):
            expected = "2 or 3 numbers, as many as in sizes[0]"
            raise ValueError(f"sizes[{number}]: expected {expected}, got {len(size)}")
        # Labels may be none; tokens and sequences are at least one.
        batches.append(
            tuple(check_count(f"sizes[{number}][{k}]", value, int(k < 2)) for k, value in enumerate(size))
        )  # fmt: skip
    return batches


def _chosen(candidates: list[int], fitting: list[int], most: int, enough: float) -> list[int]:
    """The fewest of some ascending sizes, the largest among them, in which batches take at most `enough` tokens.

    fitting: how many batches fit into each. Where `most` sizes are too few, those that take the fewest tokens.
    """
    # taken[i]: tokens of all batches up to size i, where that is the last of so many sizes; before: the one before it.
    taken: list[float] = [size * count for size, count in zip(candidates, fitting, strict=True)]
    before: list[list[int]] = []
    while taken[-1] > enough and len(before) + 1 < min(most, len(candidates)):
        fewest = list(taken)
        before.append([-1] * len(candidates))
        for i, size in enumerate(candidates):
            for j in range(i):
                tokens = taken[j] + size * (fitting[i] - fitting[j])
                if tokens < fewest[i]:
                    fewest[i], before[-1][i] = tokens, j
        taken = fewest
    chosen, place = [candidates[-1]], len(candidates) - 1
    for places in reversed(before):
        if places[place] >= 0:
            place = places[place]
            chosen.append(candidates[place])
    return chosen[::-1]


def by_work(budget: Budget) -> tuple[int, ...]:
    """Budgets of less work first: products and LayerNorms go by tokens, attention by the longest sequence as well."""
    return budget.max_tokens, budget.max_seqlen, budget.max_sequences, budget.max_labels or 0


def num_tokens(batch: Mapping[str, Any]) -> int:
    """Tokens of a packed batch."""
    return len(batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"])
