"""How a tokenizer makes sequences of texts: special tokens around one, and around and between two."""

from typing import Any, NamedTuple

import numpy as np

from bert_fast.tokenization.layout import BERT_PAIRS, PairForm


class Joined(NamedTuple):
    """Sequences one behind the other; sequence i is ids[boundaries[i]:boundaries[i + 1]].

    Attributes:
        ids (int [N]): token ids.
        type_ids (int [N], dtype of ids): 0, and that of second texts; None: all are 0.
        boundaries (int64 [n + 1]): where each sequence begins, and the end.
        has_positions: see `SequenceForm`.
    """

    ids: np.ndarray
    type_ids: np.ndarray | None
    boundaries: np.ndarray
    has_positions: bool


class SequenceForm(NamedTuple):
    """[CLS] A [SEP] and [CLS] A [SEP] B [SEP] of BERT, <s> A </s> and <s> A </s></s> B </s> of XLM-R.

    Code that has ids without special tokens makes sequences by it, without the tokenizer that they are of.

    Attributes:
        first_id: of the token in front.
        separator_id: of the one behind each text.
        pairs: what stands between two texts, and the type of the second.
    """

    first_id: int
    separator_id: int
    pairs: PairForm

    def num_special(self, pair: bool) -> int:
        """How many special tokens a sequence of one text, or of a pair, has."""
        return self.pairs.num_special(pair)

    def by_code(self, pad_id: int = 0) -> tuple[int, ...]:
        """Ids by `Code`; the entries of A and B are never used."""
        return pad_id, self.first_id, 0, self.separator_id, 0, self.separator_id

    @property
    def has_positions(self) -> bool:
        """Whether batches say that positions start at 0 in each sequence.

        Else the model counts: where there are two separators, it may be one of RoBERTa's kind, which starts elsewhere.
        """
        return self.pairs == BERT_PAIRS

    @property
    def before_second(self) -> int:
        """How many special tokens stand in front of a second text, in all."""
        return 1 + self.pairs.num_separators

    def join(self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, dtype: Any = np.int64) -> Joined:
        """Sequences of pieces of one array.

        Args:
            ids (int [M]): tokens of texts, without special ones.
            starts (int64 [n, 1] or [n, 2]): where the texts of each sequence begin in it.
            lengths (int64, as starts): how many tokens each has.
            dtype: of the ids that are returned.
        """
        # A text and what stands before it are one piece; behind the last comes the separator.
        before = np.array([1, self.pairs.num_separators][: starts.shape[1]])
        sizes = lengths + before
        sizes[:, -1] += 1
        ends = np.cumsum(sizes.ravel())
        begins = ends.reshape(sizes.shape) - sizes
        boundaries = np.zeros(len(starts) + 1, dtype=np.int64)
        boundaries[1:] = ends[starts.shape[1] - 1 :: starts.shape[1]]
        num_tokens = int(boundaries[-1])
        if len(ids):
            places = np.arange(num_tokens) + np.repeat((starts - before - begins).ravel(), sizes.ravel())
            joined = ids.take(places, mode="clip").astype(dtype, copy=False)
        else:
            joined = np.empty(num_tokens, dtype=dtype)
        joined[boundaries[:-1]], joined[boundaries[1:] - 1] = self.first_id, self.separator_id
        if starts.shape[1] == 1:
            return Joined(joined, None, boundaries, self.has_positions)
        for number in range(self.pairs.num_separators):
            joined[begins[:, 1] + number] = self.separator_id
        if self.pairs.type_id == 0:
            return Joined(joined, None, boundaries, self.has_positions)
        second = lengths[:, 1] + 1
        counts = np.stack([np.diff(boundaries) - second, second], axis=1).ravel()
        types = np.repeat(np.tile(np.array([0, self.pairs.type_id], dtype=dtype), len(starts)), counts)
        return Joined(joined, types, boundaries, self.has_positions)
