"""Attention probabilities of packed sequences as the padded tensor that callers look at, and what follows from it."""

import torch
from torch import Tensor

from bert_fast.ops.packing import Packing


def padded_probabilities(per_sequence: list[Tensor], queries: Packing, keys: Packing, num_heads: int) -> Tensor:
    """The sequences' [A, Sq, Sk] as one Tensor [B, A, S, Sk], exactly 0 on padding.

    S and Sk are the padded lengths; of a batch that came packed, max_seqlen, but no more than there are tokens.
    num_heads: A, for no sequence.
    """
    shape = (num_heads, _length(queries), _length(keys))
    if not per_sequence:
        return torch.zeros(0, *shape, device=queries.cu_seqlens.device)
    places = _places(num_heads, queries, keys)
    rows = [
        probabilities.new_zeros(shape).index_put(place, probabilities)
        for probabilities, place in zip(per_sequence, places, strict=True)
    ]
    return torch.stack(rows)


def weighted_values(padded: Tensor, v: Tensor, queries: Packing, keys: Packing) -> Tensor:
    """Probabilities [B, A, S, Sk] times v [Tk, A, D]: [T, A, D]; so callers' gradients of `padded` are the result's."""
    values = v.split(keys.cu_seqlens.diff().tolist())
    places = _places(v.shape[1], queries, keys)
    outs = [
        (row[place] @ value.transpose(0, 1)).transpose(0, 1)
        for row, place, value in zip(padded, places, values, strict=True)
    ]
    return torch.cat([v.new_empty(0, *v.shape[1:]), *outs])


def _places(num_heads: int, queries: Packing, keys: Packing) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Where a sequence's [A, Sq, Sk] lie in its row [A, S, Sk]."""
    heads = torch.arange(num_heads, device=queries.cu_seqlens.device)[:, None, None]
    return [(heads, q[:, None], k) for q, k in zip(_columns(queries), _columns(keys), strict=True)]


def _length(packing: Packing) -> int:
    if packing.padded_shape is not None:
        return packing.padded_shape[1]
    return packing.max_seqlen if torch.compiler.is_compiling() else min(packing.max_seqlen, packing.num_tokens)


def _columns(packing: Packing) -> tuple[Tensor, ...]:
    """Of every sequence, the columns of its tokens; positions may count from elsewhere, behind cached tokens."""
    columns = packing.coords[:, 1].long()
    if packing.indices is not None:
        columns = packing.indices % _length(packing)
    elif packing.padded_shape is not None:
        columns = torch.arange(len(columns), device=columns.device) % max(_length(packing), 1)
    return columns.split(packing.cu_seqlens.diff().tolist())
