"""SPLADE's vectors as PyTorch users write them, and of given tokens: what tests and benchmarks hold the op against.

Which token a word's maximum is of depends on how scores are rounded, and all of its gradient goes there. So gradients
are compared for the tokens that an implementation chose, and values say whether it chose well.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def plain_splade(
    x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int], activation: str = "relu"
) -> Tensor:
    """y [B, V] by the scores [T, V] of all tokens, as sentence-transformers' SpladePooling makes it of packed ones."""
    y = _scores(x, weight, bias).relu().log1p()
    y = y.log1p() if activation == "log1p_relu" else y
    return torch.stack([part.max(0)[0] if len(part) else y.new_zeros(y.shape[1]) for part in y.split(lengths)])


def chosen_splade(x: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, activation: str = "relu") -> Tensor:
    """y [B, V] by the scores of these tokens (int32 [B, V], -1 where y is 0), wherever maxima are."""
    top = _scores(x, weight, bias).gather(0, tokens.clamp(min=0).long())
    y = top.masked_fill(tokens < 0, 0.0).log1p()
    return y.log1p() if activation == "log1p_relu" else y


def _scores(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, V], rounded to the dtype of x, in fp32 (fp64 for fp64)."""
    scores = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return scores if x.dtype == torch.float64 else scores.float()
