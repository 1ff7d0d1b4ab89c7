"""Ids of many texts in one array, with the boundaries between texts."""

from typing import Any, NamedTuple

import numpy as np


class RaggedBatch(NamedTuple):
    """Tokens of n texts, one after the other; text i has ids[cu_seqlens[i]:cu_seqlens[i + 1]].

    NumPy arrays or torch tensors over the memory that the tokenizer wrote; `from_dlpack` of other libraries takes
    either without a copy.

    Args:
        ids (int32 or int64 [N]): token ids.
        cu_seqlens (int64 [n + 1]): where each text starts, and the end.
        offsets (int32 [N, 2] or None): start and stop in the text of each token, in code points; (0, 0) for special
            tokens put around it.
        word_ids (int32 [N] or None): which word of its text each token belongs to; -1 for special tokens.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"]
        >>> batch = bert_fast.BertTokenizer(words).encode_ragged(["a text", "a"])
        >>> batch.ids.tolist(), batch.cu_seqlens.tolist()
        ([2, 5, 6, 3, 2, 5, 3], [0, 4, 7])
    """

    ids: Any
    cu_seqlens: Any
    offsets: Any
    word_ids: Any


def cut_left(batch: RaggedBatch, max_length: int, num_before: int) -> RaggedBatch:
    """The same without the first tokens of texts that are longer than `max_length`.

    Args:
        batch: of NumPy arrays.
        max_length: greatest number of tokens of a text.
        num_before: tokens at the start of each text that stay.
    """
    starts, lengths = batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens)
    kept_lengths = np.minimum(lengths, max_length)
    places = np.arange(len(batch.ids)) - np.repeat(starts, lengths)
    excess = np.repeat(lengths - kept_lengths, lengths)
    kept = (places < num_before) | (places >= num_before + excess)
    cu_seqlens = np.concatenate([[0], np.cumsum(kept_lengths)]).astype(np.int64)
    return RaggedBatch(
        batch.ids[kept],
        cu_seqlens,
        None if batch.offsets is None else batch.offsets[kept],
        None if batch.word_ids is None else batch.word_ids[kept],
    )
