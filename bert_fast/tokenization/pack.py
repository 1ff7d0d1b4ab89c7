"""Batches without padding: all tokens of all sequences in one row, with the boundaries between them."""

from typing import Any

import numpy as np

from bert_fast.tokenization.arguments import check_device, check_flags
from bert_fast.tokenization.direct import Specials
from bert_fast.tokenization.engine import Engine
from bert_fast.tokenization.inputs import Inputs
from bert_fast.tokenization.layout import arrange, plan_rows
from bert_fast.tokenization.options import Shape

__all__ = ["PackedBatch", "pack_inputs"]


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
        check_device(device)
        check_flags(non_blocking=non_blocking)
        for key, value in self.items():
            if hasattr(value, "to"):
                self[key] = value.to(device=device, non_blocking=bool(non_blocking))
        return self


def pack_inputs(
    engine: Engine, inputs: Inputs, shape: Shape, specials: Specials, max_tokens: int | None
) -> PackedBatch:
    """The first sequences of a batch one after the other, as many whole ones as fit into `max_tokens`.

    Args:
        engine: splits the texts.
        inputs: the batch, not split into words.
        shape: how sequences that are too long are cut.
        specials: ids of special tokens.
        max_tokens: None takes all.

    Raises:
        ValueError: not even the first sequence fits.
    """
    cut = shape.truncation
    if inputs.has_pair.any() or (cut is not None and (cut.side == "left" or cut.max_length < 2)):
        ids, cu_segments, _, _ = engine.encode(inputs.strings)
        rows = plan_rows(cu_segments, inputs.has_pair, cut)
        layout = arrange(rows, len(ids))
        input_ids, row_starts = layout.fill(ids, specials.by_code()), layout.row_starts
        type_ids = layout.lookup((0, 0, 0, 0, 1, 1))
    else:
        limit = None if cut is None else cut.max_length - 2
        input_ids, row_starts, _, _ = engine.encode(
            inputs.strings, dtype="int64", around=specials.around, max_tokens=limit
        )
        type_ids = np.zeros(len(input_ids), dtype=np.int64)
    return _packed(input_ids, type_ids, row_starts, max_tokens)


def _packed(input_ids: np.ndarray, type_ids: np.ndarray, row_starts: np.ndarray, max_tokens: int | None) -> PackedBatch:
    """The first sequences that fit, with the positions of their tokens; arguments are int64 [T], [T] and [B + 1]."""
    import torch  # the rest of the tokenizer works without it

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
        input_ids=torch.from_numpy(input_ids[:num_tokens]),
        token_type_ids=torch.from_numpy(type_ids[:num_tokens]),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int(lengths.max(initial=0)),
    )
