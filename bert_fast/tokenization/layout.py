"""Where every token of a batch goes: truncation, windows, special tokens and padding, as array arithmetic.

The engine returns the ids of all segments in one flat array. A row of the result is

    [left padding] [CLS] A [SEP] B [SEP] [right padding]

(XLM-R has two [SEP] between A and B) with A and B contiguous pieces of that array. `Layout.codes` says for every
position of every row which of these it is; everything else (type ids, masks, sequence ids) is a table lookup in it, so
no Python object exists per token.

Worked example, segments [7 8 9] and [5], one pair, padded to 8:

    codes      CLS A  A  A  SEP_A B  SEP_B PAD
    input_ids  101 7  8  9  102   5  102   0
    type ids   0   0  0  0  0     1  1     0
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Code(IntEnum):
    """What stands at a position of a row."""

    PAD = 0
    CLS = 1
    A = 2
    SEP_A = 3
    B = 4
    SEP_B = 5


_IS_TEXT = np.array([False, False, True, False, True, False])


@dataclass(frozen=True)
class PairForm:
    """What differs between models in a row of two texts.

    Args:
        num_separators: how many [SEP] stand between A and B.
        type_id: token_type_ids of B and the [SEP] behind it.
    """

    num_separators: int = 1
    type_id: int = 1

    def num_special(self, pair: bool) -> int:
        """How many special tokens a row has."""
        return 2 + self.num_separators if pair else 2

    def types(self, padding: int) -> tuple[int, ...]:
        """token_type_ids by `Code`."""
        return padding, 0, 0, 0, self.type_id, self.type_id


BERT_PAIRS = PairForm()


@dataclass(frozen=True)
class Truncation:
    """How rows that are too long are cut; the fields are the arguments of the tokenizer's call.

    Args:
        strategy: "longest_first", "only_first" or "only_second".
        max_length: greatest length of a row, special tokens included.
        stride: how many tokens a window repeats of the one before.
        side: which end is cut off, "right" or "left".
    """

    strategy: str
    max_length: int
    stride: int = 0
    side: str = "right"


@dataclass(frozen=True)
class Rows:
    """The pieces of the flat array that make up each row, before padding.

    Args:
        sample (int64 [R]): the sample a row belongs to; several rows per sample are overflowing windows.
        start, length (int64 [R, 2]): piece of the flat array for A and for B.
        has_pair (bool [R]): whether the row has a B and a second [SEP].
    """

    sample: np.ndarray
    start: np.ndarray
    length: np.ndarray
    has_pair: np.ndarray


def plan_rows(
    cu_segments: np.ndarray,
    has_pair: np.ndarray,
    truncation: Truncation | None,
    add_special_tokens: bool = True,
    overflow: bool = False,
    pairs: PairForm = BERT_PAIRS,
) -> Rows:
    """Truncates as the Rust library does, and cuts what is left over into windows if `overflow`.

    Args:
        cu_segments (int64 [S + 1]): boundaries of the segments in the flat array; a sample has one or two of them.
        has_pair (bool [n]): which samples have two.
        truncation: None cuts nothing.
        add_special_tokens: whether room must be left for them.
        overflow: whether what is cut off becomes further rows.
        pairs: what rows of two texts look like.

    Raises:
        ValueError: max_length leaves no room for the special tokens, stride is not smaller than what a window can
            hold, or the segment to be cut is too short (or missing); the message names the sample.
    """
    first = np.concatenate([[0], np.cumsum(1 + has_pair)])[:-1].astype(np.int64)
    second = first + has_pair  # the same segment again where there is no pair: its length is set to 0 below
    start = np.stack([cu_segments[first], cu_segments[second]], axis=1)
    length = np.stack([cu_segments[first + 1], cu_segments[second + 1]], axis=1) - start
    length[~has_pair, 1] = 0
    sample = np.arange(len(has_pair), dtype=np.int64)
    if truncation is None:
        return Rows(sample, start, length, has_pair)
    num_special: np.ndarray = np.zeros(len(has_pair), dtype=np.int64)
    if add_special_tokens:
        num_special = np.where(has_pair, pairs.num_special(True), pairs.num_special(False))
    _check_room(truncation, has_pair, num_special)
    kept = _kept_lengths(length, has_pair, truncation.max_length - num_special, truncation.strategy)
    is_cut = (kept < length).any(axis=1)
    for index in np.flatnonzero(is_cut) if truncation.stride else ():
        for side, name in enumerate(("text", "text_pair")):
            if 0 < kept[index, side] < length[index, side] and truncation.stride >= kept[index, side]:
                raise ValueError(
                    f"stride: {truncation.stride} is not smaller than the {kept[index, side]} tokens that a window "
                    f"of {name}[{index}] holds with max_length={truncation.max_length}"
                )
    if not overflow:
        if truncation.side == "left":
            start = start + length - kept
        return Rows(sample, start, kept, has_pair)
    return _with_windows(start, length, kept, has_pair, is_cut, truncation)


def _check_room(truncation: Truncation, has_pair: np.ndarray, num_special: np.ndarray) -> None:
    """Errors that do not depend on how long the texts are."""
    if truncation.max_length < num_special.max(initial=0):
        index = int(np.argmax(num_special > truncation.max_length))
        raise ValueError(
            f"max_length: {truncation.max_length} leaves no room for the {num_special[index]} special tokens of a "
            f"{'pair' if has_pair[index] else 'text'}"
        )
    least_room = truncation.max_length - num_special.max(initial=0)
    if truncation.stride and truncation.stride >= least_room:
        raise ValueError(
            f"stride: expected less than {least_room} (max_length={truncation.max_length} without special tokens), "
            f"got {truncation.stride}"
        )


def _kept_lengths(length: np.ndarray, has_pair: np.ndarray, budget: np.ndarray, strategy: str) -> np.ndarray:
    """How many tokens of A and B stay (int64 [n, 2]), given room for `budget` (int64 [n]) tokens of text."""
    excess = length.sum(axis=1) - budget
    too_long = excess > 0
    kept = length.copy()
    if strategy == "longest_first":
        shorter, longer = length.min(axis=1), length.max(axis=1)
        # Cut only the longer one, unless it would become the shorter: then both get half, the odd token goes to the
        # longer one (to the second of two equally long ones).
        longer = np.maximum(shorter, budget - shorter)
        halve = shorter + longer > budget
        shorter = np.where(halve, budget // 2, shorter)
        longer = np.where(halve, budget - budget // 2, longer)
        first_is_longer = length[:, 0] > length[:, 1]
        pairs = np.stack(
            [np.where(first_is_longer, longer, shorter), np.where(first_is_longer, shorter, longer)], axis=1
        )
        singles = np.stack([budget, np.zeros_like(budget)], axis=1)
        cut = np.where(has_pair[:, None], pairs, singles)
        kept[too_long] = np.minimum(cut, length)[too_long]
        return kept
    side = 0 if strategy == "only_first" else 1
    nothing_stays = too_long & (budget == 0)
    for index in np.flatnonzero(too_long & ~nothing_stays):
        if side == 1 and not has_pair[index]:
            raise ValueError(f"truncation: 'only_second', but text[{index}] is too long and has no second text")
        if length[index, side] <= excess[index]:
            raise ValueError(
                f"truncation: {strategy!r} cannot make sample {index} short enough: {excess[index]} tokens have to go "
                f"and its {('first', 'second')[side]} text has {length[index, side]}"
            )
    kept[too_long, side] -= excess[too_long]
    kept[nothing_stays] = 0
    return kept


def _with_windows(
    start: np.ndarray,
    length: np.ndarray,
    kept: np.ndarray,
    has_pair: np.ndarray,
    is_cut: np.ndarray,
    truncation: Truncation,
) -> Rows:
    """All windows of all samples: per sample the truncated row first, then the overflowing ones."""
    sample: list[int] = []
    pieces: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for index in range(len(has_pair)):
        whole = [(0, int(length[index, side])) for side in (0, 1)]
        if not is_cut[index]:
            combinations = [(whole[0], whole[1])]
        else:
            a, b = (
                _windows(int(length[index, side]), int(kept[index, side]), truncation.stride, truncation.side)
                for side in (0, 1)
            )
            # The order in which the Rust library merges windows of a pair that is cut on both sides.
            combinations = [(a[0], b[0])]
            combinations += [(other, window) for other in a[1:] for window in b]
            combinations += [(a[0], window) for window in b[1:]]
        sample += [index] * len(combinations)
        pieces += combinations
    sample_array = np.array(sample, dtype=np.int64)
    bounds = np.array(pieces, dtype=np.int64).reshape(-1, 2, 2)  # [R, A or B, start or stop]
    return Rows(
        sample_array, start[sample_array] + bounds[:, :, 0], bounds[:, :, 1] - bounds[:, :, 0], has_pair[sample_array]
    )


def _windows(length: int, size: int, stride: int, side: str) -> list[tuple[int, int]]:
    """(start, stop) of the windows of `size` tokens over `length` tokens, each repeating `stride` of the one before."""
    if size >= length:
        return [(0, length)]
    if size == 0:
        return [(0, 0), (0, length)]
    windows = [(0, size)]
    while windows[-1][1] < length:
        begin = windows[-1][0] + size - stride
        windows.append((begin, min(begin + size, length)))
    return windows if side == "right" else [(length - stop, length - begin) for begin, stop in windows]


@dataclass(frozen=True)
class Layout:
    """Every position of every row of a batch, rows one after the other.

    Args:
        codes (uint8 [N]): a `Code` per position.
        row_starts (int64 [R + 1]): boundaries of the rows in `codes`.
        gather (int64 [M] or None): index into the flat ids for each A or B position, in order; None: 0, 1, 2, ...
    """

    codes: np.ndarray
    row_starts: np.ndarray
    gather: np.ndarray | None

    def fill(self, values: np.ndarray, by_code: tuple[int, ...], dtype: type = np.int64) -> np.ndarray:
        """One value per position: `values` (flat [T] or [T, 2]) where there is text, else `by_code` of its Code."""
        out = np.array(by_code, dtype=dtype)[self.codes]
        if values.ndim == 2:
            out = np.repeat(out[:, None], values.shape[1], axis=1)
        out[_IS_TEXT[self.codes]] = values if self.gather is None else values[self.gather]
        return out

    def lookup(self, by_code: tuple[int, ...]) -> np.ndarray:
        """One value per position (int64 [N]), that of its Code."""
        return np.array(by_code, dtype=np.int64)[self.codes]

    @property
    def width(self) -> int | None:
        """The common length of all rows, 0 if there are none, None if they differ."""
        lengths = np.diff(self.row_starts)
        if len(lengths) == 0:
            return 0
        return int(lengths[0]) if (lengths == lengths[0]).all() else None


def arrange(
    rows: Rows,
    num_tokens: int,
    add_special_tokens: bool = True,
    width: int = 0,
    padding_side: str = "right",
    pairs: PairForm = BERT_PAIRS,
) -> Layout:
    """Lays out the rows, each padded to `width` positions (longer rows stay as they are).

    Args:
        rows: what `plan_rows` gave.
        num_tokens: length of the flat array of ids.
        add_special_tokens: whether [CLS] and [SEP] are put around the segments.
        width: length to pad to; 0 pads nothing.
        padding_side: "right" or "left".
        pairs: what rows of two texts look like.
    """
    num_rows = len(rows.sample)
    counts = np.zeros((num_rows, 7), dtype=np.int64)  # left padding, CLS, A, SEP, B, SEP, right padding
    counts[:, 1] = int(add_special_tokens)
    counts[:, 3] = np.where(rows.has_pair, pairs.num_separators, 1) * int(add_special_tokens)
    counts[:, 2], counts[:, 4] = rows.length[:, 0], rows.length[:, 1]
    counts[:, 5] = rows.has_pair & add_special_tokens
    counts[:, 6 if padding_side == "right" else 0] = np.maximum(0, width - counts.sum(axis=1))
    row_codes = np.array([Code.PAD, Code.CLS, Code.A, Code.SEP_A, Code.B, Code.SEP_B, Code.PAD], dtype=np.uint8)
    codes = np.repeat(np.tile(row_codes, num_rows), counts.ravel())
    row_starts = np.concatenate([[0], np.cumsum(counts.sum(axis=1))]).astype(np.int64)
    lengths, starts = rows.length.ravel(), rows.start.ravel()
    if _covers_in_order(starts, lengths, num_tokens):
        return Layout(codes, row_starts, None)
    piece_starts = np.cumsum(lengths) - lengths  # where each piece begins in the concatenation of all pieces
    return Layout(codes, row_starts, np.arange(lengths.sum()) + np.repeat(starts - piece_starts, lengths))


def _covers_in_order(starts: np.ndarray, lengths: np.ndarray, num_tokens: int) -> bool:
    """Whether the pieces, one after the other, are the whole flat array."""
    if lengths.sum() != num_tokens:
        return False
    used = lengths > 0
    return bool((starts[used] == (np.cumsum(lengths) - lengths)[used]).all())
