"""The forms of texts that a WordPiece engine takes, and the forms of ids besides arrays: lists and padded rows.

Written over `encode` alone, one row after the other; the specification of what the C++ core does without a detour.
"""

import abc
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np


class WordPieceRows(abc.ABC):
    """Base class of an engine: what follows from its `encode`."""

    @abc.abstractmethod
    def encode(
        self, texts: Any, *, around: tuple[int, int] | None = None, max_tokens: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """See `WordPiece.encode`."""

    def encode_one(
        self, text: str | bytes, around: tuple[int, int] | None = None, max_tokens: int | None = None, /
    ) -> list[int]:
        """Ids of one text; arguments as those of `encode`."""
        return self.encode_lists([text], around, max_tokens)[0]

    def encode_lists(
        self, texts: Any, around: tuple[int, int] | None = None, max_tokens: int | None = None, num_threads: int = 0, /
    ) -> list[list[int]]:
        """Ids of texts as a list for each; arguments as those of `encode`."""
        ids, cu_seqlens, _, _ = self.encode(texts, around=around, max_tokens=max_tokens)
        return [ids[start:stop].tolist() for start, stop in itertools.pairwise(cu_seqlens.tolist())]

    def pack(
        self,
        texts: Any,
        around: tuple[int, int] | None = None,
        max_tokens: int | None = None,
        max_batch_tokens: int | None = None,
        num_threads: int = 0,
        /,
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """The first texts one after the other, as models take them; arguments as those of `encode`, and:

        Args:
            texts: as for `encode`.
            around: as for `encode`.
            max_tokens: as for `encode`.
            max_batch_tokens: of all texts, [CLS] and [SEP] among them: as many whole texts as fit, and the first one
                in any case.
            num_threads: as for `encode`.

        Returns:
            input_ids (int64 [N]), cu_seqlens (int32 [n + 1]), tokens of the longest text.
        """
        rows = self.encode_lists(texts, around, max_tokens)
        ends = list(itertools.accumulate(map(len, rows), initial=0))
        if max_batch_tokens is not None:
            rows = rows[: max(1, sum(end <= max_batch_tokens for end in ends[1:]))]
        ids = np.array(list(itertools.chain.from_iterable(rows)), dtype=np.int64)
        return ids, np.array(ends[: len(rows) + 1], dtype=np.int32), max(map(len, rows), default=0)

    @staticmethod
    def sequence_positions(cu_seqlens: np.ndarray) -> np.ndarray:
        """The place of every token in its sequence (int64 [N]): 0, 1, 2, 0, 1, ..., of cu_seqlens (int32 [n + 1])."""
        places = [np.arange(stop - start) for start, stop in itertools.pairwise(cu_seqlens.tolist())]
        return np.concatenate([np.zeros(0, np.int64), *places])

    def encode_rows(
        self,
        texts: Any,
        around: tuple[int, int] | None,
        pad: int,
        *,
        has_pair: np.ndarray | None = None,
        pad_type: int = 0,
        max_length: int = 0,
        truncation: str = "longest_first",
        truncate_left: bool = False,
        width: int = 0,
        multiple_of: int = 0,
        pad_left: bool = False,
        types: bool = True,
        mask: bool = True,
        num_threads: int = 0,
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None] | None:
        """A padded matrix: one row [CLS] A [SEP] or [CLS] A [SEP] B [SEP] for each text or pair of texts.

        Args:
            texts: as for `encode`: the texts of all rows, one after the other.
            around: ids (cls, sep), or None for rows without them.
            pad: id of padding.
            has_pair: bool [rows], which rows have two texts; None: none.
            pad_type: type id of padding.
            max_length: of a row, at least the number of its special tokens; 0: rows are not cut.
            truncation: "longest_first", "only_first" or "only_second".
            truncate_left: texts lose their start, not their end.
            width: of the matrix; 0: the longest row, rounded up to a multiple of `multiple_of`.
            multiple_of: 0: widths are not rounded.
            pad_left: padding stands before the tokens.
            types: whether token_type_ids are wanted.
            mask: whether attention_mask is wanted.
            num_threads: as for `encode`.

        Returns:
            input_ids, token_type_ids or None, attention_mask or None (int64 [rows, width]); None if a row is longer
            than `width`, or the text that is to be cut is too short for it or missing.
        """
        lists = iter(self.encode_lists(texts))
        special = around is not None
        cls, sep = ([around[0]], [around[1]]) if around is not None else ([], [])
        rows: list[tuple[list[int], list[int]]] = []  # [CLS] A [SEP] and B [SEP]
        for first in lists if has_pair is None else iter(lambda: next(lists, None), None):
            is_pair = has_pair is not None and bool(has_pair[len(rows)])
            second = next(lists) if is_pair else []
            if max_length:
                room = max_length - (2 + is_pair) * special
                kept = _kept(len(first), len(second), is_pair, room, truncation)
                if kept is None:
                    return None
                cut = slice(len(first) - kept[0], None) if truncate_left else slice(kept[0])
                first, second = first[cut], second[len(second) - kept[1] :] if truncate_left else second[: kept[1]]
            rows.append((cls + first + sep, second + sep if is_pair else []))
        longest = max((len(first) + len(second) for first, second in rows), default=0)
        if width and longest > width:
            return None
        width = width or (-(-longest // multiple_of) * multiple_of if multiple_of else longest)
        columns: tuple[list[list[int]], ...] = [], [], []
        for first, second in rows:
            filled, empty = len(first) + len(second), width - len(first) - len(second)
            row = first + second, [0] * len(first) + [1] * len(second), [1] * filled
            for column, values, fill in zip(columns, row, (pad, pad_type, 0), strict=True):
                column.append([fill] * empty + values if pad_left else values + [fill] * empty)
        ids, type_ids, mask_values = (np.array(column, dtype=np.int64).reshape(len(rows), width) for column in columns)
        return ids, type_ids if types else None, mask_values if mask else None


def text_list(texts: Any) -> Sequence[str | bytes]:
    """The texts of any of the forms that `encode` takes, as a list."""
    if isinstance(texts, tuple) and len(texts) == 2 and isinstance(texts[1], (np.ndarray, memoryview)):
        data, starts = memoryview(texts[0]).cast("B"), np.asarray(texts[1])
        if starts.dtype != np.int64 or starts.ndim != 1 or len(starts) == 0:
            raise ValueError(f"boundaries: expected int64 [n + 1], got {starts.dtype} {list(starts.shape)}")
        if starts[0] < 0 or starts[-1] > len(data) or (np.diff(starts) < 0).any():
            raise ValueError(f"boundaries: expected offsets from 0 to {len(data)} that do not decrease")
        return [bytes(data[start:stop]) for start, stop in itertools.pairwise(starts.tolist())]
    for name in ("to_pylist", "to_list", "tolist"):  # of Arrow's libraries, of NumPy
        if hasattr(texts, name):
            return list(getattr(texts, name)())
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
        raise TypeError(f"texts: expected a sequence of str or bytes, got {type(texts).__name__}")
    return texts


def _kept(first: int, second: int, is_pair: bool, room: int, truncation: str) -> tuple[int, int] | None:
    """How many tokens of A and B stay in a row with room for `room`; None if the strategy cannot make them fit."""
    excess = first + second - room
    if excess <= 0:
        return first, second
    if truncation == "longest_first" and not is_pair:
        return room, 0
    if truncation == "longest_first":
        shorter = min(first, second)
        longer = max(shorter, room - shorter)
        if shorter + longer > room:  # both are cut to half; the odd token stays in the longer one, or in B
            shorter, longer = room // 2, room - room // 2
        return (longer, shorter) if first > second else (shorter, longer)
    if room == 0:
        return 0, 0
    if truncation == "only_first":
        return (first - excess, second) if first > excess else None
    return (first, second - excess) if is_pair and second > excess else None
