"""Positions that count from behind a padding id, and only tokens that are no padding (RoBERTa, Liu et al. 2019).

    padding_idx = 1       input_ids = [0, 8, 1, 9, 2, 1, 1]       position_ids = [2, 3, 1, 4, 5, 1, 1]

Padding is what has the id, whatever a mask says; vectors have none, and are all counted.
"""

from typing import Any

import torch
from torch import Tensor

from bert_fast.ops.packing import Packing


def numbered_positions(input_ids: Tensor | None, padding_idx: int, packing: Packing) -> Tensor:
    """Positions of kept tokens, int [T].

    input_ids (Tensor [B, S], or [T] for packed input, int; None: tokens came as vectors).
    """
    rows, columns = packing.coords.unbind(1)
    if input_ids is None:
        return columns + (padding_idx + 1)
    is_token = input_ids != padding_idx
    if packing.padded_shape is not None:
        return packing.pack(is_token.cumsum(1).mul_(is_token).add_(padding_idx))
    counted = is_token.cumsum(0)
    before = torch.nn.functional.pad(counted, (1, 0)).index_select(0, packing.cu_seqlens[:-1].long())
    return (counted - before.index_select(0, rows.long())).mul_(is_token).add_(padding_idx)


def check_numbered_length(
    name: str, config: Any, padding_idx: int, input_ids: Tensor | None, length: int, cu_seqlens: Tensor | None
) -> None:
    """Raises ValueError where positions would leave their table. Looks at the ids only where columns are too many.

    length: the columns of the batch, or max_seqlen; cu_seqlens (Tensor [B + 1] or None): of packed input.
    """
    most = config.max_position_embeddings - padding_idx - 1
    if length <= most:
        return
    if input_ids is not None and not torch.compiler.is_compiling():
        is_token = input_ids != padding_idx
        if cu_seqlens is None:
            counts = is_token.sum(1)
        else:
            counts = torch.nn.functional.pad(is_token.cumsum(0), (1, 0)).index_select(0, cu_seqlens.long()).diff()
        length = int(counts.max()) if len(counts) else 0
        if length <= most:
            return
    raise ValueError(
        f"{name}: expected at most {most} tokens a sequence beside padding ({type(config).__name__} has "
        f"max_position_embeddings {config.max_position_embeddings}, and positions begin at padding_idx + 1 = "
        f"{padding_idx + 1}), got {length}"
    )
