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

What backward reads `n` from is the argument `saves`:

    "input"   h. Works for any weight.
    "output"  y, which the next matrix product keeps anyway: n = (y - bias) / weight. h is not stored: an empty tensor
              stands for it. Allowed where `output_suffices(weight, bias)`, and wherever no backward follows.
    "device"  one or the other, by `output_suffices`, decided where the tensors are, alike in both passes; h is
              allocated, but holds something only where the output does not suffice. For devices whose weights the host
              cannot look at without waiting, and for graphs, whose allocations may not depend on data.

Source: Ba et al. 2016 (arXiv:1607.06450), section 3; BERT's use of it: Devlin et al. 2019 (arXiv:1810.04805), A.2;
recovering n from y: DeepSpeed's `normalize_invertible`, NVIDIA apex's `memory_efficient`.
Precision: fp64 inputs are computed in fp64, all others in fp32; each output is rounded once. Where h is stored,
statistics and y come from h as it is stored, so that the backward pass, which sees no other, is the gradient of this
very function: with statistics of another h, a row of tiny variance would get an n made of rounding errors times a huge
rstd. Where it is not, nothing rounds h. So y depends on which of the two it is, in the last place of half precision.
"""

import torch
from torch import Tensor

from bert_fast.reference.dropout import dropout_scale, keep_mask

__all__ = [
    "MAX_WEIGHT",
    "MIN_WEIGHT",
    "SAVES",
    "dropout_add_layer_norm_bwd",
    "dropout_add_layer_norm_fwd",
    "max_shift",
    "output_suffices",
]

SAVES = ("input", "output", "device")

# The limits within which n can be read from y. y is rounded by |y| u, u half a unit of its dtype, so n errs by
# u (|n| + |bias / weight|); plain torch, which rounds h, errs by u |n| and more. docs/kernels has the measurements.
# fp16's y is subnormal, and rounded more coarsely than that, where |n weight| < 2**-14: this leaves 4 bits.
MIN_WEIGHT = 2.0**-10
# With |n| < sqrt(8192) the largest |y| is 512 * (90.5 + 1.5) < 65,504, what fp16 holds. It also keeps infinities out.
MAX_WEIGHT = 2.0**9


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def max_shift(dtype: torch.dtype) -> float:
    """The largest |bias / weight| with which n may be recovered from a y of this dtype."""
    # In fp16 and bf16 nothing rounds but y itself, and with 1.5 in every column the gradients err up to 1.8 times as
    # much as plain torch's (2 is the limit). In fp32 every sum rounds as well: with 8 in every column it is 1.7.
    return 1.5 if dtype in (torch.float16, torch.bfloat16) else 8.0


def output_suffices(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether backward may read n from y: bool [], on the device of weight. False where a parameter is NaN.

    weight, bias (Tensor [H]): of the LayerNorm; dtype: that of y.
    """
    work = _work_dtype(weight)  # as every back-end does, so that all give one answer
    size, shift = weight.to(work).abs(), bias.to(work).abs()
    return ((size >= MIN_WEIGHT) & (size <= MAX_WEIGHT) & (shift <= size * max_shift(dtype))).all()


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
    saves: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LayerNorm(residual + dropout(x + x_bias)) and what its backward needs.

    x, residual (Tensor [T, H], one dtype): the branch, and what it is added to.
    x_bias (Tensor [H] or None): bias of the linear layer before, added here to save a pass.
    weight, bias (Tensor [H]); eps (float): used as given.
    dropout_p (float): probability of dropping; seed (Tensor [1], int64) and coords (Tensor [T, 2], int32: original
        row and position of every token) name the mask, may be None iff dropout_p is 0; site (int): see DropoutSite.
    saves: one of SAVES, see above.
    Returns: y, h (Tensor [T, H], dtype of x; h [0] if saves is "output"); mean, rstd (Tensor [T], fp32, fp64 for fp64
        inputs).
    """
    assert saves in SAVES
    work = _work_dtype(x)
    branch = x.to(work) if x_bias is None else x.to(work) + x_bias.to(work)
    exact_h = residual.to(work) + _dropout(branch, dropout_p, seed, coords, site)
    stored_h = exact_h.to(x.dtype)
    if saves == "input":
        h = stored_h.to(work)
    elif saves == "output":
        h, stored_h = exact_h, stored_h.new_empty(0)
    else:
        h = torch.where(output_suffices(weight, bias, x.dtype), exact_h, stored_h.to(work))
    mean = h.mean(dim=1)
    centred = h - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(dim=1) + eps)
    y = centred * rstd[:, None] * weight.to(work) + bias.to(work)
    return y.to(x.dtype), stored_h, mean, rstd


def dropout_add_layer_norm_bwd(
    dy: Tensor,
    y: Tensor | None,
    h: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    coords: Tensor | None,
    site: int,
    saves: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `dropout_add_layer_norm_fwd`, from what it saved and the replayed mask.

    dy (Tensor [T, H], dtype of y): gradient of y; the other arguments as in forward and as it returned them.
    y: not read, may be None, if saves is "input"; h and mean if it is "output". Parameters must be those of forward.
    Returns: dx, dresidual (Tensor [T, H], dtype of dy; the very same tensor when dropout_p is 0);
        dx_bias, dweight, dbias (Tensor [H], dtype of weight).
    """
    work = _work_dtype(dy)
    dy_, weight_ = dy.to(work), weight.to(work)
    normalised = _normalised(y, h, mean, rstd, weight_, bias.to(work), saves, dy.dtype)
    g = dy_ * weight_
    mean_g = g.mean(dim=1, keepdim=True)
    mean_gn = (g * normalised).mean(dim=1, keepdim=True)
    dh = rstd[:, None] * (g - mean_g - normalised * mean_gn)
    dx_ = _dropout(dh, dropout_p, seed, coords, site)
    dweight, dbias, dx_bias = ((dy_ * normalised).sum(dim=0), dy_.sum(dim=0), dx_.sum(dim=0))
    dresidual = dh.to(dy.dtype)
    dx = dresidual if dropout_p == 0.0 else dx_.to(dy.dtype)
    return dx, dresidual, dx_bias.to(weight.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def _normalised(
    y: Tensor | None,
    h: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    saves: str,
    dtype: torch.dtype,
) -> Tensor:
    """n [T, H], from y or from h; weight and bias in the dtype of the computation."""
    assert saves in SAVES
    if saves == "device":
        args = (y, h, mean, rstd, weight, bias)
        from_y, from_h = (_normalised(*args, choice, dtype) for choice in ("output", "input"))
        return torch.where(output_suffices(weight, bias, dtype), from_y, from_h)
    if saves == "output":
        assert y is not None
        return (y.to(weight.dtype) - bias) / weight
    assert h is not None and mean is not None
    return (h.to(weight.dtype) - mean[:, None]) * rstd[:, None]
