"""Batches without padding: all tokens of all sequences in one row, with the boundaries between them."""

from typing import Any

import numpy as np

from bert_fast.tokenization.layout import Layout

__all__ = ["PackedBatch", "make_packed_batch"]


class PackedBatch(dict[str, Any]):
    """Sequences one after the other, for `model(**batch)`; keys are attributes too.

    Entries:
        input_ids, token_type_ids, position_ids (int64 [T]); positions start at 0 in each sequence.
        cu_seqlens (int32 [B + 1]): sequence i is [cu_seqlens[i]:cu_seqlens[i + 1]].
        max_seqlen (int): length of the longest sequence.
    """

    @property
    def num_sequences(self) -> int:
        """How many texts are in the batch: with `max_tokens`, possibly fewer than were given."""
        return len(self["cu_seqlens"]) - 1

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has neither attribute nor entry {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def to(self, device: Any, *, non_blocking: bool = False) -> "PackedBatch":
        """Moves every tensor to `device`, in place; returns itself."""
        for key, value in self.items():
            if hasattr(value, "to"):
                self[key] = value.to(device=device, non_blocking=non_blocking)
        return self


def make_packed_batch(ids: np.ndarray, layout: Layout, special: tuple[int, ...], max_tokens: int | None) -> PackedBatch:
    """The first sequences of a layout without padding, as many whole ones as fit into `max_tokens`.

    Args:
        ids (int [N]): flat ids of all segments.
        layout: one row per sequence.
        special: ids by `Code`, for what is not text.
        max_tokens: None takes all.

    Raises:
        ValueError: not even the first sequence fits.
    """
    import torch  # the rest of the tokenizer works without it

    row_starts = layout.row_starts
    count = len(row_starts) - 1
    if max_tokens is not None:
        count = int(np.searchsorted(row_starts, max_tokens, side="right")) - 1
        if count == 0 and len(row_starts) > 1:
            raise ValueError(f"max_tokens: text[0] has {row_starts[1]} tokens, more than {max_tokens}; pass max_length")
        count = min(count, len(row_starts) - 1)
    num_tokens = int(row_starts[count])
    cu_seqlens = row_starts[: count + 1]
    lengths = np.diff(cu_seqlens)
    positions = np.arange(num_tokens) - np.repeat(cu_seqlens[:-1], lengths)
    return PackedBatch(
        input_ids=torch.from_numpy(layout.fill(ids, special)[:num_tokens]),
        token_type_ids=torch.from_numpy(layout.lookup((0, 0, 0, 0, 1, 1))[:num_tokens]),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int(lengths.max(initial=0)),
    )
