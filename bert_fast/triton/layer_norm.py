"""y = LayerNorm(x) in Triton, forward and backward.

Forward, per row of H columns:
    mean = sum(x) / H;   rstd = 1 / sqrt(sum((x - mean)^2) / H + eps)
    y    = (x - mean) * rstd * weight + bias

Backward, with n = (x - mean) * rstd and g = dy * weight:
    dx = rstd * (g - sum(g) / H - n * sum(g * n) / H)
    dweight = sum over rows of dy * n;   dbias = sum over rows of dy

Source: Ba et al. 2016 (arXiv:1607.06450), section 3; derivation in docs/kernels/layer_norm.md.

Shapes: x, y, dy, dx [T, H]; weight, bias and their gradients [H]; mean, rstd [T].
Bytes moved per row, with elements of e bytes (the floor, and what the kernels do; parameters come from cache):
    forward   reads x: H e; writes y, mean, rstd: H e + 8
    backward  reads dy, x, mean, rstd: 2 H e + 8; writes dx: H e
    backward, once per program: 8 H bytes of partial sums written, and read again by the second stage
Saved: x, mean, rstd. Recomputed: n.
Precision: loads are widened to fp32 at once; statistics, sums and all arithmetic are fp32; outputs round once.
Determinism: no atomics; partial sums are added in a fixed order that depends on T and the device alone.

Tiles are [CHUNKS, ROWS, CHUNK_COLS], as `_launch.py:RowTile` explains: a row belongs to one warp, or few.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.reference.layer_norm import LayerNorm
from bert_fast.triton._column_sums import column_sums
from bert_fast.triton._launch import RowTile, architecture, ceil_div, row_tile, unit_stride
from bert_fast.triton._launch_plan import launch_plan
from bert_fast.triton._layer_norm import layer_norm_backward, normalise, store_of_rows
from bert_fast.triton._math import row_major
from bert_fast.triton._summing_programs import summing_programs


@triton.jit(do_not_specialize=["x_row_stride", "param_row_stride", "n_rows"])
def _layer_norm_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_row_stride,
    param_row_stride,
    n_rows,
    eps,
    N_COLS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    STATISTICS_FIRST: tl.constexpr,
):
    """ROWS rows per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :, None]  # [1, ROWS, 1]
    col = tl.arange(0, CHUNKS)[:, None, None] * CHUNK_COLS + tl.arange(0, CHUNK_COLS)[None, None, :]
    mask_row = row < n_rows
    mask_col = col < N_COLS  # [CHUNKS, 1, CHUNK_COLS]
    mask = mask_row & mask_col
    # Parameters are addressed as tensors [T, H] of row stride 0. The stride is an argument, so that Triton does not see
    # the 0: it then loads parameters in the layout of x. Strides count STRIDE_UNIT elements, so that Triton sees rows
    # start at whole vectors.
    param_col = row * param_row_stride * STRIDE_UNIT + col

    x = tl.load(row_major(x_ptr, row * x_row_stride * STRIDE_UNIT + col, STRIDE_UNIT), mask=mask, other=0.0).to(
        tl.float32
    )
    centred, mean, rstd = normalise(x, mask_col, eps, N_COLS)
    if STATISTICS_FIRST:
        store_of_rows(mean_ptr, row, mean, mask_row, CHUNK_COLS // VECTOR)
        store_of_rows(rstd_ptr, row, rstd, mask_row, CHUNK_COLS // VECTOR)
    weight = tl.load(row_major(weight_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
    bias = tl.load(row_major(bias_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
    y = centred * rstd * weight + bias
    tl.store(row_major(y_ptr, row * N_COLS + col, N_COLS), y.to(y_ptr.dtype.element_ty), mask=mask)
    if not STATISTICS_FIRST:
        store_of_rows(mean_ptr, row, mean, mask_row, CHUNK_COLS // VECTOR)
        store_of_rows(rstd_ptr, row, rstd, mask_row, CHUNK_COLS // VECTOR)


@triton.jit(do_not_specialize=["dy_row_stride", "x_row_stride", "param_row_stride", "n_rows"])
def _layer_norm_bwd_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    dx_ptr,
    partial_ptr,
    dy_row_stride,
    x_row_stride,
    param_row_stride,
    n_rows,
    N_COLS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK_COLS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
):
    """Every num_programs-th group of ROWS rows, then the program's sums over its rows.

    partial (fp32 [num_programs, 2, N_COLS]) takes the sums for dweight and dbias.
    """
    col = tl.arange(0, CHUNKS)[:, None, None] * CHUNK_COLS + tl.arange(0, CHUNK_COLS)[None, None, :]
    mask_col = col < N_COLS  # [CHUNKS, 1, CHUNK_COLS]
    tile_row = tl.arange(0, ROWS)[None, :, None].to(tl.int64)  # offsets pass 2^31 where row numbers do not
    param_col = tile_row * param_row_stride * STRIDE_UNIT + col  # as in forward
    weight = tl.load(row_major(weight_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
    dweight = tl.zeros([CHUNKS, ROWS, CHUNK_COLS], tl.float32)
    dbias = tl.zeros([CHUNKS, ROWS, CHUNK_COLS], tl.float32)

    for group in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        row = group * ROWS + tile_row
        mask_row = row < n_rows
        mask = mask_row & mask_col
        dy = tl.load(row_major(dy_ptr, row * dy_row_stride * STRIDE_UNIT + col, STRIDE_UNIT), mask=mask, other=0.0).to(
            tl.float32
        )
        x = tl.load(row_major(x_ptr, row * x_row_stride * STRIDE_UNIT + col, STRIDE_UNIT), mask=mask, other=0.0).to(
            tl.float32
        )
        mean = tl.load(mean_ptr + row, mask=mask_row, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=mask_row, other=0.0)
        # In masked columns dy is 0, hence g, and what n holds there enters no sum.
        n = (x - mean) * rstd
        dx = layer_norm_backward(dy * weight, n, rstd, N_COLS)
        tl.store(row_major(dx_ptr, row * N_COLS + col, N_COLS), dx.to(dx_ptr.dtype.element_ty), mask=mask)
        # The selections tell the compiler that the sums of a chunk past the last column stay 0: it then gives them no
        # registers. Rows past the last add 0 by themselves: there dy and rstd are 0.
        dweight += tl.where(mask_col, dy * n, 0.0)
        dbias += tl.where(mask_col, dy, 0.0)

    sum_col = tl.arange(0, CHUNKS)[:, None] * CHUNK_COLS + tl.arange(0, CHUNK_COLS)[None, :]  # [CHUNKS, CHUNK_COLS]
    sum_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * (2 * N_COLS) + sum_col
    tl.store(sum_ptr, tl.sum(dweight, 1), mask=sum_col < N_COLS)
    tl.store(sum_ptr + N_COLS, tl.sum(dbias, 1), mask=sum_col < N_COLS)


@dataclass(frozen=True)
class LaunchConfig:
    """How rows of one width and dtype are laid over threads."""

    forward: RowTile
    backward: RowTile
    backward_programs_per_multiprocessor: int


@functools.cache
def launch_config(hidden_size: int, dtype: torch.dtype) -> LaunchConfig:
    """The configuration for rows of `hidden_size` columns, 1 to 8,192, of fp32, fp16 or bf16."""
    # As for dropout_add_layer_norm: up to 1,024 columns a row belongs to one warp, whose sums need no barrier.
    forward = row_tile(hidden_size, dtype, max_elements=32, best_elements=32)
    # An element also costs a thread its weight and two running sums; 24 fill the registers without spilling.
    backward = row_tile(hidden_size, dtype, max_elements=24, best_elements=16)
    elements = ceil_div(hidden_size, backward.chunk_cols) * backward.vector
    # Warps that the register file holds (65,536 registers): 12 of up to 168, 16 of up to 128, 20 of up to 96. More
    # programs would run in a second, nearly empty round. The ahead-of-time gate checks the registers behind this.
    resident_warps = 12 if elements > 16 else 16 if elements > 12 else 20
    return LaunchConfig(forward, backward, max(1, resident_warps // backward.num_warps))


def layer_norm_fwd(a: LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the forward kernel: (y, mean, rstd), as `reference.layer_norm`.

    x [T, H] of fp32, fp16 or bf16, H <= 8,192; rows anywhere in memory, a copy is made where neighbouring columns are
    not neighbours. Returns new, contiguous tensors.
    """
    x = unit_stride(a.x)
    num_rows, hidden_size = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(num_rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if num_rows == 0:
        return y, mean, rstd
    tile = launch_config(hidden_size, x.dtype).forward
    stride_unit = math.gcd(tile.vector, x.stride(0))
    launch_plan(
        _layer_norm_fwd_kernel,
        N_COLS=hidden_size,
        **tile.constants,
        STRIDE_UNIT=stride_unit,
        # Narrow fp32 rows spill on sm_80 where statistics are held to the end; elsewhere that costs fewer registers.
        STATISTICS_FIRST=x.dtype == torch.float32 and hidden_size < 1024 and architecture(x.device) == "sm_80",
        num_warps=tile.num_warps,
        enable_fp_fusion=True,  # centred * rstd * weight + bias
    )(
        (ceil_div(num_rows, tile.rows),),
        (x, a.weight.contiguous(), a.bias.contiguous(), y, mean, rstd),
        (x.stride(0) // stride_unit, 0, num_rows, a.eps),
    )
    return y, mean, rstd


def layer_norm_bwd(a: LayerNorm, dy: Tensor, mean: Tensor, rstd: Tensor) -> dict[str, Tensor]:
    """Launches the two backward stages: gradients by name, as `reference.layer_norm`; dy, x as in forward."""
    dy, x, weight = unit_stride(dy), unit_stride(a.x), a.weight
    num_rows, hidden_size = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return {"x": dx, "weight": torch.zeros_like(weight), "bias": torch.zeros_like(weight)}
    config = launch_config(hidden_size, x.dtype)
    tile = config.backward
    stride_unit = math.gcd(tile.vector, dy.stride(0), x.stride(0))
    num_groups = ceil_div(num_rows, tile.rows)
    num_programs = summing_programs(
        num_groups, tile.rows, config.backward_programs_per_multiprocessor, x.dtype, x.device
    )
    partial = torch.empty(num_programs, 2, hidden_size, dtype=torch.float32, device=x.device)
    launch_plan(
        _layer_norm_bwd_kernel,
        N_COLS=hidden_size,
        CHUNKS=tile.chunks,
        ROWS=tile.rows,
        CHUNK_COLS=tile.chunk_cols,
        STRIDE_UNIT=stride_unit,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,  # g - mean(g) - n * mean(g n), and the running sums
    )(
        (num_programs,),
        (dy, x, mean, rstd, weight.contiguous(), dx, partial),
        (dy.stride(0) // stride_unit, x.stride(0) // stride_unit, 0, num_rows),
    )
    dweight, dbias = column_sums(partial, weight.dtype)
    return {"x": dx, "weight": dweight, "bias": dbias}
