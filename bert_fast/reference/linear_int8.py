"""A linear layer in 8 bits: rows of x and of the weight are rounded to 256 levels, and sums of products are exact.

    weight      w_int = round(w / s_w),  s_w = max |w| / 127                            a scale per row of W
    rows of x   s_x = (max(x, 0) - min(x, 0)) / 255,  z = round(-min(x, 0) / s_x)       a scale and a zero point per row
                q = clamp(round(x / s_x) + z, 0, 255)
    y           s_x s_w sum_k (q - z) w_int + b,  with  sum (q - z) w_int = sum q w_int - z sum w_int

Nothing is calibrated: the scale of a row of x comes from that row. A row with NaN or an infinity gives NaN. Everything
is fp32, rounded to nearest, ties to even, in the order written here, so that every back-end has the same bits; x / s_x
is x times 1 / s_x. There is no backward: rounding has no useful derivative.
Source: Jacob et al. 2017 (arXiv:1712.05877), section 2; dynamic scales by row as in Yao et al. 2022 (arXiv:2206.01861).
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

COLUMNS, DEPTH, STEPS = 16, 4, 64  # of the layout: csrc/cpu/int8.h
MAX_FEATURES = 65536  # whose sums fit into int32
_STEP, _LEAST_SCALE = (torch.tensor(1.0) / 255).item(), torch.finfo(torch.float32).tiny


class QuantizedWeight(NamedTuple):
    """A weight [N, K] in 8 bits, laid out for dot products of bytes.

    packed[i, j, 4 n + k] is the value of column 16 i + n at 4 j + k, so that 64 bytes hold 4 steps of 16 columns. K is
    padded with zeros to a multiple of 64, N to one of 16.
    """

    packed: Tensor  # int8 [ceil(N / 16), 16 ceil(K / 64), 64]
    scale: Tensor  # fp32 [N]
    sums: Tensor  # int32 [N], over K


class LinearInt8(NamedTuple):
    """The arguments: x in fp32, and a `QuantizedWeight`."""

    x: Annotated[Tensor, "x T K"]
    packed: Annotated[Tensor, "int8 _ _ 64"]
    scale: Annotated[Tensor, "s N"]
    sums: Annotated[Tensor, "int32 N"]
    bias: Annotated[Tensor | None, "s N"]


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Of weight (Tensor [N, K], fp32); a row with NaN or an infinity has the scale NaN."""
    num_columns, k = weight.shape
    largest = weight.abs().amax(1) if k else weight.new_zeros(num_columns)
    scale = largest / 127
    is_given = scale.isfinite() & (scale >= _LEAST_SCALE)
    rounded = (weight / torch.where(is_given, scale, 1.0)[:, None]).round()
    rounded = torch.where(is_given[:, None], rounded, 0.0).clamp(-127, 127).to(torch.int8)
    scale = torch.where(largest.isfinite(), torch.where(is_given, scale, 0.0), torch.nan)
    padded = torch.nn.functional.pad(rounded, (0, -k % STEPS, 0, -num_columns % COLUMNS))
    blocks = padded.unflatten(0, (-1, COLUMNS)).unflatten(2, (-1, DEPTH)).transpose(1, 2)  # [n, K / 4, 16, 4]
    return QuantizedWeight(blocks.flatten(2).contiguous(), scale, rounded.sum(1, dtype=torch.int32))


def unpacked(packed: Tensor, num_columns: int, k: int) -> Tensor:
    """int8 [N, K] of a `QuantizedWeight`."""
    blocks = packed.unflatten(2, (COLUMNS, DEPTH)).transpose(1, 2)
    return blocks.flatten(2).flatten(0, 1)[:num_columns, :k]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (Tensor [T, K], fp32 of whole numbers), scale (Tensor [T], fp32), zero (Tensor [T], fp32 of whole numbers)."""
    if not x.shape[1]:
        return x, x.new_zeros(x.shape[0]), x.new_zeros(x.shape[0])
    is_finite = x.isfinite().all(1)
    x = torch.where(is_finite[:, None], x, 0.0)
    least, greatest = x.amin(1).clamp(max=0.0), x.amax(1).clamp(min=0.0)
    scale = greatest * _STEP - least * _STEP
    is_given = scale >= _LEAST_SCALE
    inverse = torch.where(is_given, 1.0 / torch.where(is_given, scale, 1.0), 0.0)
    zero = (-least * inverse).round().clamp(max=255)
    q = ((x * inverse[:, None]).round() + zero[:, None]).clamp(0, 255)
    scale = torch.where(is_given, scale, 0.0)
    return q, torch.where(is_finite, scale, torch.nan), zero


def linear_int8_fwd(a: LinearInt8) -> Tensor:
    """y (Tensor [T, N], fp32)."""
    q, scale, zero = quantize_rows(a.x)
    weight = unpacked(a.packed, a.scale.shape[0], a.x.shape[1])
    sums = q.double() @ weight.double().T - zero.double()[:, None] * a.sums.double()  # exact: whole numbers below 2^53
    y = sums.to(torch.float32) * (scale[:, None] * a.scale)
    return y if a.bias is None else y + a.bias
