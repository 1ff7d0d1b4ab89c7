"""y = LayerNorm(residual + dropout(x + x_bias)): what stands at the end of both halves of a BERT layer.

    h    = residual + (x + x_bias) * m          m = keep * scale, the mask of reference/dropout.py; 1 without dropout
    mean = sum(h) / H                           over the columns of a row
    rstd = 1 / sqrt(sum((h - mean)^2) / H + eps)    NaN where the sum overflows, see layer_norm.py
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
    "output"  y, which the next matrix product keeps anyway: n = (y - bias) / weight. h is not stored: there is
              none. Allowed where `output_suffices(weight, bias)`, and wherever no backward follows.
    "device"  one or the other, by `output_suffices`, decided where the tensors are, alike in both passes; h is
              allocated, but holds something only where the output does not suffice. For devices whose weights the host
              cannot look at without waiting, and for graphs, whose allocations may not depend on data.
    "again"   as "device", but forward returns neither h nor mean: an op that this one is a part of computes h again,
              from what it keeps for its other parts, and gives it to backward, which computes its mean. Statistics are
              those of "device".

Source: Ba et al. 2016 (arXiv:1607.06450), section 3; BERT's use of it: Devlin et al. 2019 (arXiv:1810.04805), A.2;
recovering n from y: DeepSpeed's `normalize_invertible`, NVIDIA apex's `memory_efficient`.
Precision: fp64 inputs are computed in fp64, all others in fp32; each output is rounded once. Where h is stored,
statistics and y come from h as it is stored, so that the backward pass, which sees no other, is the gradient of this
very function: with statistics of another h, a row of tiny variance would get an n made of rounding errors times a huge
rstd. Where it is not, nothing rounds h. So y depends on which of the two it is, in the last place of half precision.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.layer_norm import inverse_deviation

SAVES = ("input", "output", "device")
AGAIN = "again"  # what an op that consists of others may say, see above

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


def _dropout(x: Tensor, a: "DropoutAddLayerNorm") -> Tensor:
    """x * scale where kept, x * 0 elsewhere: what is not finite stays so, as in PyTorch."""
    if a.dropout_p == 0.0:
        return x
    assert a.seed is not None and a.coords is not None
    keep = keep_mask(a.seed, a.site, a.coords, x.shape[1], a.dropout_p)
    return x * (keep.to(x.dtype) * dropout_scale(a.dropout_p))


class DropoutAddLayerNorm(NamedTuple):
    """The arguments; parameters have one dtype, that of x or, beside half precision, fp32. Any strides."""

    x: Annotated[Tensor, "x T H+"]  # the branch
    residual: Annotated[Tensor, "x T H"]  # what it is added to
    x_bias: Annotated[Tensor | None, "p H"]  # bias of the linear layer before, added here to save a pass
    weight: Annotated[Tensor, "p H"]
    bias: Annotated[Tensor, "p H"]
    eps: float  # added to the variance as given
    dropout_p: float  # probability of dropping
    seed: Annotated[Tensor | None, "int64 1"]  # with coords and site it names the mask; neither is needed without
    coords: Annotated[Tensor | None, "int32 T 2"]  # (row, position) of every token in the original batch
    site: int
    saves: str  # one of SAVES, see above


def dropout_add_layer_norm_fwd(a: DropoutAddLayerNorm) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """LayerNorm(residual + dropout(x + x_bias)) and what its backward needs.

    Returns: y (Tensor [T, H], dtype of x); h, of the same kind, None where it is known before that the output is read
        instead (saves is "output") and where it is computed again; mean, rstd (Tensor [T], fp32, fp64 for fp64 inputs),
        mean too None where h is computed again.
    """
    assert a.saves in (*SAVES, AGAIN)
    x, work = a.x, _work_dtype(a.x)
    branch = x.to(work) if a.x_bias is None else x.to(work) + a.x_bias.to(work)
    exact_h = a.residual.to(work) + _dropout(branch, a)
    stored_h = None if a.saves == "output" else exact_h.to(x.dtype)
    if stored_h is None:
        h = exact_h
    elif a.saves == "input":
        h = stored_h.to(work)
    else:
        h = torch.where(output_suffices(a.weight, a.bias, x.dtype), exact_h, stored_h.to(work))
    mean = h.mean(dim=1)
    centred = h - mean[:, None]
    rstd = inverse_deviation(centred, a.eps)
    y = centred * rstd[:, None] * a.weight.to(work) + a.bias.to(work)
    if a.saves == AGAIN:
        return y.to(x.dtype), None, None, rstd
    return y.to(x.dtype), stored_h, mean, rstd


def dropout_add_layer_norm_bwd(
    a: DropoutAddLayerNorm, dy: Tensor, y: Tensor | None, h: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> dict[str, Tensor]:
    """Gradients by name, from what forward saved and the replayed mask.

    dy (Tensor [T, H], dtype of y): gradient of y. y: not read, may be None, if saves is "input"; h and mean if it is
        "output"; mean, if it is "again". Parameters must be those of forward; x, residual, x_bias and eps are not
        read, may be None.
    Returns: x, residual (Tensor [T, H], dtype of dy; the very same tensor when dropout_p is 0); x_bias, weight, bias
        (Tensor [H], dtype of weight).
    """
    work, weight = _work_dtype(dy), a.weight
    dy_, weight_ = dy.to(work), weight.to(work)
    normalised = _normalised(y, h, mean, rstd, weight_, a.bias.to(work), a.saves, dy.dtype)
    g = dy_ * weight_
    mean_g = g.mean(dim=1, keepdim=True)
    mean_gn = (g * normalised).mean(dim=1, keepdim=True)
    dh = rstd[:, None] * (g - mean_g - normalised * mean_gn)
    dx_ = _dropout(dh, a)
    dweight, dbias, dx_bias = ((dy_ * normalised).sum(dim=0), dy_.sum(dim=0), dx_.sum(dim=0))
    dresidual = dh.to(dy.dtype)
    dx = dresidual if a.dropout_p == 0.0 else dx_.to(dy.dtype)
    of_columns = {"x_bias": dx_bias, "weight": dweight, "bias": dbias}
    return {"x": dx, "residual": dresidual} | {name: t.to(weight.dtype) for name, t in of_columns.items()}


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
    assert saves in (*SAVES, AGAIN)
    if saves in ("device", AGAIN):
        args = (y, h, mean, rstd, weight, bias)
        from_y, from_h = (_normalised(*args, choice, dtype) for choice in ("output", "input"))
        return torch.where(output_suffices(weight, bias, dtype), from_y, from_h)
    if saves == "output":
        assert y is not None
        return (y.to(weight.dtype) - bias) / weight
    assert h is not None
    wide_h = h.to(weight.dtype)
    return (wide_h - (wide_h.mean(dim=1) if mean is None else mean)[:, None]) * rstd[:, None]
