"""Dropout on its own: y = x * keep * scale, forward and backward, which is the same map of dy.

Bytes per token: x read, y written, 8 of coords; the mask is made in registers and written nowhere. A program has a tile
[ROWS, COLS]; a warp takes one row of it, each thread 128 bits of neighbouring columns at a time, which are what one
Philox call names (`_math.keep_values`). Rows may be of any length.

Precision: x * scale in fp32, rounded once, and exactly 0 where dropped, also of what is not finite. Deterministic.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.reference.dropout import dropout_threshold
from bert_fast.triton._launch import ceil_div, dropout_arguments, unit_stride
from bert_fast.triton._launch_plan import launch_plan
from bert_fast.triton._math import keep_values, row_major, split_seed

_WARPS = 4
_ROWS = 8  # two loads of 128 bits in flight for every thread
_VECTOR_BYTES = 16


@triton.jit(do_not_specialize=["x_row_stride", "n_rows", "drop_max", "site"])
def _dropout_kernel(
    x_ptr, y_ptr, seed_ptr, coords_ptr, x_row_stride, n_rows, scale, drop_max, site, N_COLS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr, STRIDE_UNIT: tl.constexpr,
):  # fmt: skip
    """One tile; blocks of columns follow one another. Strides count STRIDE_UNIT elements."""
    NUM_BLOCKS: tl.constexpr = (N_COLS + COLS - 1) // COLS
    first_col = tl.program_id(0) % NUM_BLOCKS * COLS
    row = (tl.program_id(0) // NUM_BLOCKS * ROWS + tl.arange(0, ROWS))[None, :, None].to(tl.int64)
    col = first_col + tl.arange(0, COLS)[None, None, :]
    vector_col = (first_col + tl.arange(0, COLS // VECTOR)[None, None, :] * VECTOR).to(tl.uint32)
    mask_row = row < n_rows
    mask = mask_row & (col < N_COLS)
    x = tl.load(row_major(x_ptr, row * x_row_stride * STRIDE_UNIT + col, STRIDE_UNIT), mask=mask, other=0.0).to(
        tl.float32
    )
    batch_row = tl.load(coords_ptr + row * 2, mask=mask_row, other=0).to(tl.uint32)
    position = tl.load(coords_ptr + row * 2 + 1, mask=mask_row, other=0).to(tl.uint32)
    k0, k1 = split_seed(tl.load(seed_ptr))
    keep = keep_values(k0, k1, site.to(tl.uint32), batch_row, position, vector_col, drop_max.to(tl.uint32), VECTOR)
    y = tl.where(keep, x * scale, 0.0)
    tl.store(row_major(y_ptr, row * N_COLS + col, N_COLS), y.to(y_ptr.dtype.element_ty), mask=mask)


def dropout_fwd(x: Tensor, dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int) -> Tensor:
    """As `reference.dropout.dropout_fwd`, of x [T, H] in fp32, fp16 or bf16; a new contiguous tensor."""
    if dropout_threshold(dropout_p) == 0:
        return x.clone(memory_format=torch.contiguous_format)
    x = unit_stride(x)
    num_rows, num_cols = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    vector = _VECTOR_BYTES // x.dtype.itemsize
    cols = 32 * vector
    stride_unit = math.gcd(vector, x.stride(0))
    seed, coords, drop_max, scale = dropout_arguments(dropout_p, seed, coords)
    launch_plan(
        _dropout_kernel,
        N_COLS=num_cols,
        ROWS=_ROWS,
        COLS=cols,
        VECTOR=vector,
        STRIDE_UNIT=stride_unit,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )(
        (ceil_div(num_rows, _ROWS) * ceil_div(num_cols, cols),),
        (x, y, seed, coords),
        (x.stride(0) // stride_unit, num_rows, scale, drop_max, site),
    )
    return y


def dropout_bwd(dy: Tensor, dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int) -> Tensor:
    """dx = dy * keep * scale: the same map as forward."""
    return dropout_fwd(dy, dropout_p, seed, coords, site)
