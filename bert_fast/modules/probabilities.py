"""Attention probabilities of packed sequences as the padded tensor that callers look at."""

import torch
from torch import Tensor

from bert_fast.ops.packing import Packing

__all__ = ["padded_probabilities"]


def padded_probabilities(per_sequence: list[Tensor], queries: Packing, keys: Packing, num_heads: int) -> Tensor:
    """The sequences' [A, Sq, Sk] as one Tensor [B, A, S, Sk], exactly 0 on padding.

    S and Sk are the padded lengths; of a batch that came packed, the longest sequence's. num_heads: A, for no sequence.
    """
    shape = (num_heads, _length(queries), _length(keys))
    columns_q, columns_k = _columns(queries), _columns(keys)
    if not per_sequence:
        return torch.zeros(0, *shape, device=queries.cu_seqlens.device)
    heads = torch.arange(num_heads, device=queries.cu_seqlens.device)[:, None, None]
    rows = []
    for probabilities, of_q, of_k in zip(per_sequence, columns_q, columns_k, strict=True):
        where = heads, of_q[:, None], of_k
        rows.append(probabilities.new_zeros(shape).index_put(where, probabilities))
    return torch.stack(rows)


def _length(packing: Packing) -> int:
    return packing.max_seqlen if packing.padded_shape is None else packing.padded_shape[1]


def _columns(packing: Packing) -> tuple[Tensor, ...]:
    """Of every sequence, the columns of its tokens; positions may count from elsewhere, behind cached tokens."""
    positions = packing.coords[:, 1].long()
    if packing.indices is not None:
        positions = packing.indices % _length(packing)
    elif packing.padded_shape is not None:
        positions = torch.arange(len(positions), device=positions.device) % max(_length(packing), 1)
    return positions.split(packing.cu_seqlens.diff().tolist())
