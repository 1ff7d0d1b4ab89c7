"""Tokenized examples of fine-tuning in three arrays, out of which any batch is gathered without a loop over tokens.

Two examples, a pair of texts and a single one:

    ids             [101, 7, 8, 102, 9, 102,   101, 7, 102]
    token_type_ids  [  0, 0, 0,   0, 1,   1,     0, 0,   0]
    boundaries      [0, 6, 9]
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bert_fast.checks import check_choice, check_count
from bert_fast.data.arguments import check_tokenizer_kind, row_indices
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.arguments import members
from bert_fast.tokenization.form import Joined
from bert_fast.tokenization.layout import Truncation, plan_rows
from bert_fast.tokenization.pack import PackedBatch


@dataclass(frozen=True)
class Sequences:
    """Sequences one behind the other, special tokens included; sequence i is ids[boundaries[i]:boundaries[i + 1]].

    `len(sequences)` is their number.

    Args:
        ids (int32 [N]): token ids.
        boundaries (int64 [n + 1]): where each sequence begins, and the end.
        token_type_ids (uint8 [N] or None): as the tokenizer gives them, of BERT 1 for the second text and its [SEP];
            None: all are 0.
        has_positions: whether batches have position_ids; False: their model counts.

    Raises:
        TypeError, ValueError: arrays of other types or sizes.
    """

    ids: np.ndarray
    boundaries: np.ndarray
    token_type_ids: np.ndarray | None = None
    has_positions: bool = True

    def __post_init__(self) -> None:
        for name, dtype in (("ids", np.int32), ("boundaries", np.int64), ("token_type_ids", np.uint8)):
            array = getattr(self, name)
            if array is None and name == "token_type_ids":
                continue
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{name}: expected an array, got {type(array).__name__}")
            if array.dtype != dtype or array.ndim != 1:
                raise TypeError(f"{name}: expected {np.dtype(dtype)} [n], got {array.dtype} {list(array.shape)}")
        ends = self.boundaries
        if len(ends) == 0 or ends[0] != 0 or ends[-1] != len(self.ids) or (np.diff(ends) < 0).any():
            got = ends if len(ends) < 8 else f"{ends[:3]} ... {ends[-3:]}"
            raise ValueError(f"boundaries: expected ascending numbers from 0 to {len(self.ids)} (ids), got {got}")
        if self.token_type_ids is not None and len(self.token_type_ids) != len(self.ids):
            raise ValueError(f"token_type_ids: expected {len(self.ids)} entries (ids), got {len(self.token_type_ids)}")

    @classmethod
    def joined(
        cls,
        tokenizer: Tokenizer,
        texts: list[str],
        pairs: list[str] | None = None,
        *,
        max_length: int | None = None,
        truncation: str = "longest_first",
    ) -> "Sequences":
        """Texts, or pairs of them, with special tokens: the ids that `tokenizer(texts, pairs, ...)` gives.

        Args:
            tokenizer: splits all texts in one call.
            texts: first texts.
            pairs: a second text for each; None: there are none.
            max_length: longer sequences are cut to so many tokens, special ones counted; None: nothing is cut.
            truncation: which text of a pair is cut: "longest_first", "only_first" or "only_second".

        Raises:
            TypeError, ValueError: `pairs` has another length, something is no text, `max_length` leaves no room for
                the special tokens, or the text that should be cut is too short.
        """
        check_tokenizer_kind(tokenizer)
        max_length = None if max_length is None else check_count("max_length", max_length, 0)
        check_choice("truncation", truncation, ("longest_first", "only_first", "only_second"))
        if pairs is None:
            batch = tokenizer.encode_ragged(texts, max_length=max_length)
            return cls(batch.ids, batch.cu_seqlens, has_positions=tokenizer.form.has_positions)
        texts, pairs = _listed("texts", texts), _listed("pairs", pairs)
        if len(texts) != len(pairs):
            raise ValueError(f"pairs: expected {len(texts)} texts, one for each of texts, got {len(pairs)}")
        segments: list[Any] = [None] * (2 * len(texts))
        segments[0::2], segments[1::2] = texts, pairs
        batch = tokenizer.encode_ragged(segments, add_special_tokens=False)
        cut = None if max_length is None else Truncation(truncation, max_length, side=tokenizer.truncation_side)
        form = tokenizer.form
        rows = plan_rows(batch.cu_seqlens, np.ones(len(texts), dtype=bool), cut, pairs=form.pairs)
        return cls.of(form.join(batch.ids, rows.start, rows.length, dtype=np.int32))

    @classmethod
    def of(cls, joined: Joined) -> "Sequences":
        """What `SequenceForm.join` made, with ids of int32."""
        types = None if joined.type_ids is None else joined.type_ids.astype(np.uint8)
        return cls(joined.ids, joined.boundaries, types, joined.has_positions)

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sequence: int32 [n]."""
        return np.diff(self.boundaries).astype(np.int32)

    def gather(self, indices: np.ndarray, **labels: Any) -> PackedBatch:
        """Some sequences, in this order, as what a model takes: CPU tensors.

        Args:
            indices (int [B]): which.
            labels: further entries of the batch; see `packed_batch`.

        Raises:
            IndexError: an index is below 0 or not below `len(self)`.
        """
        some = self.take(indices)
        return packed_batch(Joined(some.ids, some.token_type_ids, some.boundaries, self.has_positions), **labels)

    def places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the tokens of some sequences (int [B]) stand in `ids`, and in any array with an entry per token.

        Returns:
            places (int64 [T]); cu_seqlens (int64 [B + 1]), the boundaries of the sequences in `places`.

        Raises:
            IndexError: see `gather`.
        """
        indices = row_indices(indices, len(self))
        starts = self.boundaries[indices]
        lengths = self.boundaries[indices + 1] - starts
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return ranges(starts, lengths), cu_seqlens

    def take(self, indices: np.ndarray) -> "Sequences":
        """Some sequences (int [m]), in this order, by themselves. Raises IndexError as `gather`."""
        places, boundaries = self.places(indices)
        types = None if self.token_type_ids is None else self.token_type_ids[places]
        return replace(self, ids=self.ids[places], boundaries=boundaries, token_type_ids=types)


def packed_batch(joined: Joined, **more: Any) -> PackedBatch:
    """Sequences as what a model takes: CPU tensors.

    more: further entries; NumPy arrays become tensors.
    Returns: input_ids, token_type_ids, position_ids (int64 [T]), cu_seqlens (int32 [B + 1]), max_seqlen (int); without
        `has_positions` no position_ids.
    """
    ids, types, lengths = joined.ids, joined.type_ids, np.diff(joined.boundaries)
    more["input_ids"] = ids.astype(np.int64, copy=False)
    more["token_type_ids"] = np.zeros(len(ids), np.int64) if types is None else types.astype(np.int64, copy=False)
    more["cu_seqlens"] = joined.boundaries.astype(np.int32)
    if joined.has_positions:
        more["position_ids"] = ranges(np.zeros_like(lengths), lengths)
    entries = {name: torch.from_numpy(one) if isinstance(one, np.ndarray) else one for name, one in more.items()}
    return PackedBatch(**entries, max_seqlen=int(lengths.max(initial=0)))


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of every start, one range behind the other: [5, 0], [2, 3] gives [5, 6, 0, 1, 2].

    Args:
        starts (int [n]): first numbers.
        lengths (int [n]): how many of each, 0 or more.

    Returns:
        int64 [sum of lengths].
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def _listed(name: str, texts: Any) -> list[Any]:
    """The texts as a list; raises TypeError naming the one that is none."""
    listed = members(name, texts)
    if not set(map(type, listed)) <= {str, bytes}:  # few types: much less than to look at each text
        for index, text in enumerate(listed):
            if not isinstance(text, str | bytes):
                raise TypeError(f"{name}[{index}]: expected str or bytes, got {type(text).__name__}")
    return listed
