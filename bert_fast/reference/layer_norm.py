"""y = LayerNorm(x): every row brought to mean 0 and variance 1, then scaled and shifted per column.

    mean = sum(x) / H                               over the columns of a row
    rstd = 1 / sqrt(sum((x - mean)^2) / H + eps)
    n    = (x - mean) * rstd
    y    = n * weight + bias

Backward, with g = dy * weight (x acts directly and through mean and rstd):

    dx      = rstd * (g - mean(g) - n * mean(g * n))
    dweight = sum over rows of dy * n
    dbias   = sum over rows of dy

Saved for backward: x, mean, rstd. Source: Ba et al. 2016 (arXiv:1607.06450), section 3.
"""

import torch
from torch import Tensor

from bert_fast.reference.precision import wide

__all__ = ["layer_norm_bwd", "layer_norm_fwd"]


def layer_norm_fwd(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm over the last dimension.

    x (Tensor [T, H]); weight, bias (Tensors [H]); eps (float): used as given.
    Returns: y (Tensor [T, H], dtype of x); mean, rstd (Tensors [T], fp32; fp64 for fp64 inputs).
    """
    x_ = wide(x)
    mean = x_.mean(dim=1)
    centred = x_ - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(dim=1) + eps)
    y = centred * rstd[:, None] * wide(weight) + wide(bias)
    return y.to(x.dtype), mean, rstd


def layer_norm_bwd(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `layer_norm_fwd`: dx (Tensor [T, H], dtype of x); dweight, dbias (Tensors [H], dtype of weight)."""
    dy_ = wide(dy)
    normalised = (wide(x) - mean[:, None]) * rstd[:, None]
    g = dy_ * wide(weight)
    mean_g = g.mean(dim=1, keepdim=True)
    mean_gn = (g * normalised).mean(dim=1, keepdim=True)
    dx = rstd[:, None] * (g - mean_g - normalised * mean_gn)
    dweight, dbias = (dy_ * normalised).sum(dim=0), dy_.sum(dim=0)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)
