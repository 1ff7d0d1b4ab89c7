"""y = LayerNorm(residual + dropout(x + x_bias)): what stands at the end of both halves of a BERT layer.

    h    = residual + (x + x_bias) * m          m = keep * scale, the mask of reference/dropout.py; 1 without dropout
    mean = sum(h) / H                           over the columns of a row
    rstd = 1 / sqrt(sum((h - mean)^2) / H + eps)
    n    = (h - mean) * rstd                    "normalised"
    y    = n * weight + bias

Backward, with g = dy * weight. y depends on h directly and through mean and rstd; collecting the three paths gives

    dresidual = dh = rstd * (g - mean(g) - n * mean(g * n))
    dx             = dh * m
    dx_bias        = sum over rows of dx
    dweight        = sum over rows of dy * n
    dbias          = sum over rows of dy

Source: Ba et al. 2016 (arXiv:1607.06450), section 3; BERT's use of it: Devlin et al. 2019 (arXiv:1810.04805), A.2.
Precision: fp64 inputs are computed in fp64, all others in fp32; each output is rounded once. Statistics and `y` come
from `h` as it is stored, so that the backward pass, which sees no other, is the gradient of this very function: with
statistics of another `h`, a row of tiny variance would get an `n` made of rounding errors times a huge rstd.
"""

import torch
from torch import Tensor

from bert_fast.reference.dropout import dropout_scale, keep_mask

__all__ = ["dropout_add_layer_norm_bwd", "dropout_add_layer_norm_fwd"]


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _dropout(x: Tensor, dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int) -> Tensor:
    """x * scale where kept, exactly 0 elsewhere (also where x is not finite)."""
    if dropout_p == 0.0:
        return x
    assert seed is not None and coords is not None
    keep = keep_mask(seed, site, coords, x.shape[1], dropout_p)
    return torch.where(keep, x * dropout_scale(dropout_p), 0.0)


def dropout_add_layer_norm_fwd(
    x: Tensor,
    residual: Tensor,
    x_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    coords: Tensor | None,
    site: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LayerNorm(residual + dropout(x + x_bias)) and what its backward needs.

    x, residual (Tensor [T, H], one dtype): the branch, and what it is added to.
    x_bias (Tensor [H] or None): bias of the linear layer before, added here to save a pass.
    weight, bias (Tensor [H]); eps (float): used as given.
    dropout_p (float): probability of dropping; seed (Tensor [1], int64) and coords (Tensor [T, 2], int32: original
        row and position of every token) name the mask, may be None iff dropout_p is 0; site (int): see DropoutSite.
    Returns: y, h (Tensor [T, H], dtype of x); mean, rstd (Tensor [T], fp32, fp64 for fp64 inputs).
    """
    work = _work_dtype(x)
    branch = x.to(work) if x_bias is None else x.to(work) + x_bias.to(work)
    h = (residual.to(work) + _dropout(branch, dropout_p, seed, coords, site)).to(x.dtype)
    mean = h.to(work).mean(dim=1)
    centred = h.to(work) - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(dim=1) + eps)
    y = centred * rstd[:, None] * weight.to(work) + bias.to(work)
    return y.to(x.dtype), h, mean, rstd


def dropout_add_layer_norm_bwd(
    dy: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    coords: Tensor | None,
    site: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `dropout_add_layer_norm_fwd`, from its saved h, mean and rstd and the replayed mask.

    dy (Tensor [T, H], dtype of h): gradient of y; the other arguments as in forward.
    Returns: dx, dresidual (Tensor [T, H], dtype of h; the very same tensor when dropout_p is 0);
        dx_bias, dweight, dbias (Tensor [H], dtype of weight).
    """
    work = _work_dtype(h)
    dy_ = dy.to(work)
    normalised = (h.to(work) - mean[:, None]) * rstd[:, None]
    g = dy_ * weight.to(work)
    mean_g = g.mean(dim=1, keepdim=True)
    mean_gn = (g * normalised).mean(dim=1, keepdim=True)
    dh = rstd[:, None] * (g - mean_g - normalised * mean_gn)
    dx_ = _dropout(dh, dropout_p, seed, coords, site)
    dweight, dbias, dx_bias = ((dy_ * normalised).sum(dim=0), dy_.sum(dim=0), dx_.sum(dim=0))
    dresidual = dh.to(h.dtype)
    dx = dresidual if dropout_p == 0.0 else dx_.to(h.dtype)
    return dx, dresidual, dx_bias.to(weight.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)
