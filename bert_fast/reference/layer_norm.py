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

Where the variance overflows, 1 / sqrt(inf) = 0 would make a row of biases that hides it. rstd is NaN there, and so are
the row and every gradient through it. PyTorch's operator gives NaN or the bias, depending on the length of the row.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.precision import wide


def inverse_deviation(centred: Tensor, eps: float) -> Tensor:
    """rstd [T] of centred rows [T, H]: 1 / sqrt(variance + eps), NaN where the variance is infinite."""
    variance = centred.square().mean(dim=1)
    return torch.rsqrt(variance + eps).masked_fill(variance == torch.inf, torch.nan)


class LayerNorm(NamedTuple):
    """The arguments; parameters have the dtype of x or, beside half precision, fp32. Any strides."""

    x: Annotated[Tensor, "x T H+"]
    weight: Annotated[Tensor, "p H"]
    bias: Annotated[Tensor, "p H"]
    eps: float  # added to the variance as given


def layer_norm_fwd(a: LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    """y (Tensor [T, H], dtype of x); mean, rstd (Tensors [T], fp32; fp64 for fp64 inputs)."""
    x_ = wide(a.x)
    mean = x_.mean(dim=1)
    centred = x_ - mean[:, None]
    rstd = inverse_deviation(centred, a.eps)
    y = centred * rstd[:, None] * wide(a.weight) + wide(a.bias)
    return y.to(a.x.dtype), mean, rstd


def layer_norm_bwd(a: LayerNorm, dy: Tensor, mean: Tensor, rstd: Tensor) -> dict[str, Tensor]:
    """Gradients by name, of the shapes and dtypes of their fields.

    dy (Tensor [T, H], dtype of x); mean, rstd as returned by the forward; a.bias and a.eps are not read: may be None.
    """
    dy_ = wide(dy)
    normalised = (wide(a.x) - mean[:, None]) * rstd[:, None]
    g = dy_ * wide(a.weight)
    mean_g = g.mean(dim=1, keepdim=True)
    mean_gn = (g * normalised).mean(dim=1, keepdim=True)
    dx = rstd[:, None] * (g - mean_g - normalised * mean_gn)
    dweight, dbias = (dy_ * normalised).sum(dim=0), dy_.sum(dim=0)
    return {"x": dx.to(a.x.dtype), "weight": dweight.to(a.weight.dtype), "bias": dbias.to(a.weight.dtype)}
