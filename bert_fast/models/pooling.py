"""One vector for a sequence out of those of its tokens."""

from typing import Literal, get_args

import torch
from torch import Tensor

from bert_fast.checks import check_choice, check_shape

Pooling = Literal["mean", "cls", "max", "last", "weighted"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


def pooled(hidden: Tensor, cu_seqlens: Tensor, pooling: Pooling) -> Tensor:
    """One vector for every sequence.

    hidden (Tensor [T, H], floating): of packed tokens. cu_seqlens (Tensor [B + 1], int): sequence i has the tokens
        cu_seqlens[i] to cu_seqlens[i + 1]. One without tokens gets zeros (with "cls" and "last", anything).
    pooling: "mean", "max", "cls" (the first token), "last" (the last one), or "weighted": the mean in which token k,
        counted from 1, weighs k (Muennighoff 2022, arXiv:2202.08904, section 3).
    Returns: Tensor [B, H], fp32 (fp64 for fp64). Deterministic: no atomics.
    Source: Reimers & Gurevych 2019 (arXiv:1908.10084), section 3.
    """
    check_shape("hidden", hidden, ("T", "H"))
    check_shape("cu_seqlens", cu_seqlens, ("B + 1",))
    check_choice("pooling", pooling, POOLINGS)
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    ends = cu_seqlens.to(hidden.device, torch.int64)
    if pooling == "cls":
        return wide.index_select(0, ends[:-1])
    if pooling == "last":
        return wide.index_select(0, ends[1:] - 1)
    lengths = ends.diff()
    if pooling == "max":
        most = torch.segment_reduce(wide, "max", offsets=ends, unsafe=True)
        return most.masked_fill((lengths == 0)[:, None], 0.0)
    totals = lengths
    if pooling == "weighted":
        first = ends[:-1].repeat_interleave(lengths, output_size=len(wide))
        wide = wide * (torch.arange(len(wide), device=wide.device) - first + 1)[:, None].to(wide)
        totals = lengths * (lengths + 1) // 2
    return torch.segment_reduce(wide, "sum", offsets=ends, unsafe=True) / totals.clamp(min=1)[:, None].to(wide)
