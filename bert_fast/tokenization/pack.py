"""Batches without padding: all tokens of all sequences in one row, with the boundaries between them."""

from typing import Any

import numpy as np

from bert_fast.tokenization.engine import Engine
from bert_fast.tokenization.form import SequenceForm
from bert_fast.tokenization.inputs import Inputs
from bert_fast.tokenization.layout import arrange, plan_rows
from bert_fast.tokenization.options import Shape
from bert_fast.tokenization.packed_batch import Later
from bert_fast.tokenization.packed_batch import PackedBatch as PackedBatch

_SHORT_TEXT_TOKENS = 8  # with max_tokens, first looks at as many texts as would fit at this length


def pack_texts(
    engine: Engine, texts: Any, form: SequenceForm, limit: int | None, max_tokens: int | None
) -> PackedBatch | None:
    """`pack_inputs` for a list or column of single texts, not looked at; None where they are none.

    Of a long list, no more is looked at than may fit, and no more is read than does.

    Args:
        engine: splits the texts.
        texts: what the caller gave.
        form: of sequences.
        limit: tokens of a text without these; what exceeds it at the end is cut.
        max_tokens: None takes all.

    Raises:
        ValueError: not even the first text fits.
    """
    around = form.first_id, form.separator_id
    try:
        if max_tokens is None or not isinstance(texts, list):
            ids, cu_seqlens, longest = engine.pack(texts, around, limit, max_tokens)
        else:
            count = 1 + max_tokens // _SHORT_TEXT_TOKENS
            ids, cu_seqlens, longest = engine.pack(texts[:count], around, limit, max_tokens)
            while count < len(texts) and count < len(cu_seqlens):
                count = 4 * count
                ids, cu_seqlens, longest = engine.pack(texts[:count], around, limit, max_tokens)
    except (TypeError, ValueError):  # not all are single texts, or one is none; which, is said where they are split
        return None
    if max_tokens is not None and len(cu_seqlens) > 1 and cu_seqlens[1] > max_tokens:
        raise _too_long(cu_seqlens, max_tokens)
    return _batch(ids, None, cu_seqlens, longest, form.has_positions)


def pack_inputs(
    engine: Engine, inputs: Inputs, shape: Shape, form: SequenceForm, max_tokens: int | None
) -> PackedBatch:
    """The first sequences of a batch one after the other, as many whole ones as fit into `max_tokens`.

    Args:
        engine: splits the texts.
        inputs: the batch, not split into words.
        shape: how sequences that are too long are cut.
        form: of sequences.
        max_tokens: None takes all.

    Raises:
        ValueError: not even the first sequence fits.
    """
    ids, cu_segments, _, _ = engine.encode(inputs.strings)
    rows = plan_rows(cu_segments, inputs.has_pair, shape.truncation, pairs=form.pairs)
    layout = arrange(rows, len(ids), pairs=form.pairs)
    starts = layout.row_starts
    count = len(starts) - 1
    if max_tokens is not None:
        count = int(np.searchsorted(starts, max_tokens, side="right")) - 1
        if count == 0 and len(starts) > 1:
            raise _too_long(starts, max_tokens)
    input_ids, type_ids = layout.fill(ids, form.by_code()), layout.lookup(form.pairs.types(0))
    cu_seqlens, num_tokens = starts[: count + 1], starts[count]
    longest = int(np.diff(cu_seqlens).max(initial=0))
    return _batch(
        input_ids[:num_tokens], type_ids[:num_tokens], cu_seqlens.astype(np.int32), longest, form.has_positions
    )


def _too_long(cu_seqlens: np.ndarray, max_tokens: int) -> ValueError:
    return ValueError(f"max_tokens: text[0] has {cu_seqlens[1]} tokens, more than {max_tokens}; pass max_length")


def _batch(
    input_ids: np.ndarray, type_ids: np.ndarray | None, cu_seqlens: np.ndarray, max_seqlen: int, has_positions: bool
) -> PackedBatch:
    """Of input_ids (int64 [T]), type_ids (the same; None: all 0), cu_seqlens (int32 [B + 1])."""
    import torch  # the rest of the tokenizer works without it

    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        token_type_ids=Later.ZEROS if type_ids is None else torch.from_numpy(type_ids),
        **({"position_ids": Later.POSITIONS} if has_positions else {}),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=max_seqlen,
    )
