"""y = LayerNorm(residual + dropout(x + x_bias)) in Triton, forward and backward.

Forward, per row of H columns:
    h    = residual + (x + x_bias) * m          m = scale where kept, else 0; 1 without dropout
    mean = sum(h) / H;   rstd = 1 / sqrt(sum((h - mean)^2) / H + eps)
    y    = (h - mean) * rstd * weight + bias

Backward, with n = (h - mean) * rstd and g = dy * weight:
    dresidual = rstd * (g - sum(g) / H - n * sum(g * n) / H);   dx = dresidual * m
    dx_bias = sum over rows of dx;   dweight = sum of dy * n;   dbias = sum of dy

Source: Ba et al. 2016 (arXiv:1607.06450), section 3; derivation in docs/kernels/dropout_add_layer_norm.md.

Shapes: x, residual, y, h, dy, dx, dresidual [T, H]; x_bias, weight, bias and their gradients [H]; mean, rstd [T].
Bytes moved per row, with elements of e bytes (the floor, and what the kernels do; parameters come from cache):
    forward   reads x, residual, coords: 2 H e + 8; writes y, h, mean, rstd: 2 H e + 8
    backward  reads dy, h, mean, rstd, coords: 2 H e + 16; writes dx, dresidual: 2 H e (H e without dropout)
    backward, once per program: 12 H bytes of partial sums written, and read again by the second stage
Saved: h, mean, rstd. Recomputed: n, and the mask, from the seed.
Precision: loads are widened to fp32 at once; statistics, sums and all arithmetic are fp32; outputs round once.
Determinism: no atomics; partial sums are added in a fixed order that depends on T and the device alone.

Tiles have three dimensions [A, ROWS, N]: A lies in the registers of a thread, ROWS over groups of threads, N along
neighbouring threads, VECTOR neighbouring columns to each (Triton hands out threads along the fastest dimension first).
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.kernels._launch import (
    ceil_div,
    dropout_arguments,
    next_power_of_2,
    num_multiprocessors,
    unit_stride,
    vector_elements,
)
from bert_fast.kernels._math import add_pairs, keep_values, split_seed
from bert_fast.reference.dropout import dropout_threshold

__all__ = ["LaunchConfig", "dropout_add_layer_norm_bwd", "dropout_add_layer_norm_fwd", "launch_config"]

_WARP = 32  # threads of a warp; where AMD has 64, a warp covers two rows, or two vectors of one
# fp32 values of one tensor that a forward thread holds: two tensors and the arithmetic stay under 100 registers.
_FORWARD_ELEMENTS = 32
# A backward thread also holds three partial sums; 16 values keep it under 128 registers, the limit for 16 warps.
_BACKWARD_ELEMENTS = 16
_RESIDENT_WARPS = 16  # of the backward kernel on one multiprocessor: 512 threads * 128 registers = its register file


@triton.jit(do_not_specialize=["n_rows", "drop_max", "site"])
def _dropout_add_layer_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    x_bias_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    coords_ptr,
    y_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    x_row_stride,
    residual_row_stride,
    n_rows,
    eps,
    scale,
    drop_max,
    site,
    N_COLS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """ROWS rows per program, each cut into CHUNKS chunks of CHUNK_COLS columns. Tiles are [CHUNKS, ROWS, CHUNK_COLS]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :, None]  # [1, ROWS, 1]
    chunk_start = tl.arange(0, CHUNKS)[:, None, None] * CHUNK_COLS  # [CHUNKS, 1, 1]
    col = chunk_start + tl.arange(0, CHUNK_COLS)[None, None, :]  # [CHUNKS, 1, CHUNK_COLS]
    mask_row = row < n_rows
    mask_col = col < N_COLS
    mask = mask_row & mask_col
    # Parameters are addressed by a full tile: Triton then loads them in the layout of x, whatever their dtype, where a
    # tile without rows would be loaded in a layout of its own and exchanged between threads.
    param_col = tl.broadcast_to(col, [CHUNKS, ROWS, CHUNK_COLS])
    param_mask = tl.broadcast_to(mask_col, [CHUNKS, ROWS, CHUNK_COLS])

    branch = tl.load(x_ptr + (row * x_row_stride + col), mask=mask, other=0.0).to(tl.float32)
    h = tl.load(residual_ptr + (row * residual_row_stride + col), mask=mask, other=0.0).to(tl.float32)
    if HAS_X_BIAS:
        branch += tl.load(x_bias_ptr + param_col, mask=param_mask, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
        batch_row = tl.load(coords_ptr + row * 2, mask=mask_row, other=0).to(tl.uint32)
        position = tl.load(coords_ptr + row * 2 + 1, mask=mask_row, other=0).to(tl.uint32)
        vector_col = (chunk_start + tl.arange(0, CHUNK_COLS // VECTOR)[None, None, :] * VECTOR).to(tl.uint32)
        keep = keep_values(
            k0, k1, site.to(tl.uint32), batch_row, position, vector_col, drop_max.to(tl.uint32), VECTOR
        )
        # Selecting before scaling lets the multiplication and the addition become one instruction, and keeps a dropped
        # infinity out of the sum.
        h += tl.where(keep, branch, 0.0) * scale
    else:
        h += branch
    tl.store(h_ptr + (row * N_COLS + col), h.to(h_ptr.dtype.element_ty), mask=mask)

    # Two passes over registers: E[h^2] - E[h]^2 would cancel where the mean is large. First the sum inside a thread.
    mean = tl.sum(tl.sum(h, 0, keep_dims=True), 2, keep_dims=True) / N_COLS  # [1, ROWS, 1]
    centred = tl.where(mask_col, h - mean, 0.0)
    variance = tl.sum(tl.sum(centred * centred, 0, keep_dims=True), 2, keep_dims=True) / N_COLS
    rstd = tl.rsqrt(variance + eps)
    weight = tl.load(weight_ptr + param_col, mask=param_mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + param_col, mask=param_mask, other=0.0).to(tl.float32)
    y = centred * rstd * weight + bias
    tl.store(y_ptr + (row * N_COLS + col), y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean, mask=mask_row)
    tl.store(rstd_ptr + row, rstd, mask=mask_row)


@triton.jit(do_not_specialize=["n_rows", "drop_max", "site"])
def _dropout_add_layer_norm_bwd_kernel(
    dy_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    seed_ptr,
    coords_ptr,
    dx_ptr,
    dresidual_ptr,
    partial_ptr,
    dy_row_stride,
    h_row_stride,
    n_rows,
    scale,
    drop_max,
    site,
    N_COLS: tl.constexpr,
    REPEATS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Every num_programs-th tile of REPEATS * ROWS rows; then this program's sums over its rows.

    Tiles are [REPEATS, ROWS, BLOCK_COLS]: whole rows, spread over so many threads that the three sums over rows cost
    each thread few registers. partial (fp32 [num_programs, 3, N_COLS]) takes the sums for dx_bias, dweight, dbias.
    """
    col = tl.arange(0, BLOCK_COLS)[None, None, :]
    mask_col = col < N_COLS
    weight = tl.load(weight_ptr + col, mask=mask_col, other=0.0).to(tl.float32)
    vector_col = (tl.arange(0, BLOCK_COLS // VECTOR)[None, None, :] * VECTOR).to(tl.uint32)
    # [REPEATS, ROWS, 1]; 64 bits, since offsets pass 2^31 where row numbers do not.
    tile_row = (tl.arange(0, REPEATS)[:, None, None] * ROWS + tl.arange(0, ROWS)[None, :, None]).to(tl.int64)
    dx_bias = tl.zeros([ROWS, BLOCK_COLS], tl.float32)
    dweight = tl.zeros([ROWS, BLOCK_COLS], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK_COLS], tl.float32)
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))

    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, REPEATS * ROWS), tl.num_programs(0)):
        row = tile * (REPEATS * ROWS) + tile_row
        mask_row = row < n_rows
        mask = mask_row & mask_col
        dy = tl.load(dy_ptr + (row * dy_row_stride + col), mask=mask, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + (row * h_row_stride + col), mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=mask_row, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=mask_row, other=0.0)
        # Where a column is masked, dy and hence g are 0: what n holds there enters no sum.
        n = (h - mean) * rstd
        g = dy * weight
        sum_g, sum_gn = tl.reduce((g, g * n), 2, add_pairs, keep_dims=True)  # [REPEATS, ROWS, 1] each
        dresidual = rstd * (g - sum_g / N_COLS - n * (sum_gn / N_COLS))
        tl.store(dresidual_ptr + (row * N_COLS + col), dresidual.to(dresidual_ptr.dtype.element_ty), mask=mask)
        dweight += tl.sum(dy * n, 0)
        dbias += tl.sum(dy, 0)
        if HAS_DROPOUT:
            batch_row = tl.load(coords_ptr + row * 2, mask=mask_row, other=0).to(tl.uint32)
            position = tl.load(coords_ptr + row * 2 + 1, mask=mask_row, other=0).to(tl.uint32)
            keep = keep_values(
                k0, k1, site.to(tl.uint32), batch_row, position, vector_col, drop_max.to(tl.uint32), VECTOR
            )
            dx = tl.where(keep, dresidual, 0.0) * scale
            tl.store(dx_ptr + (row * N_COLS + col), dx.to(dx_ptr.dtype.element_ty), mask=mask)
            dx_bias += tl.sum(dx, 0)
        else:
            dx_bias += tl.sum(dresidual, 0)

    offs_n = tl.arange(0, BLOCK_COLS)
    mask_n = offs_n < N_COLS
    row_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * (3 * N_COLS) + offs_n
    tl.store(row_ptr, tl.sum(dx_bias, 0), mask=mask_n)
    tl.store(row_ptr + N_COLS, tl.sum(dweight, 0), mask=mask_n)
    tl.store(row_ptr + 2 * N_COLS, tl.sum(dbias, 0), mask=mask_n)


@triton.jit(do_not_specialize=["n_partials"])
def _dropout_add_layer_norm_bwd_reduce_kernel(
    partial_ptr,
    dx_bias_ptr,
    dweight_ptr,
    dbias_ptr,
    n_partials,
    N_COLS: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Sums partial (fp32 [n_partials, 3, N_COLS]) over its first dimension; program (i, j) takes block i of output j."""
    offs_n = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask_n = offs_n < N_COLS
    which = tl.program_id(1)
    acc = tl.zeros([BLOCK_PARTIALS, BLOCK_COLS], tl.float32)
    for start in tl.range(0, n_partials, BLOCK_PARTIALS):
        partial = start + tl.arange(0, BLOCK_PARTIALS)[:, None]
        offset = (partial.to(tl.int64) * 3 + which) * N_COLS + offs_n[None, :]
        acc += tl.load(partial_ptr + offset, mask=(partial < n_partials) & mask_n[None, :], other=0.0)
    total = tl.sum(acc, 0)
    if which == 0:
        tl.store(dx_bias_ptr + offs_n, total.to(dx_bias_ptr.dtype.element_ty), mask=mask_n)
    elif which == 1:
        tl.store(dweight_ptr + offs_n, total.to(dweight_ptr.dtype.element_ty), mask=mask_n)
    else:
        tl.store(dbias_ptr + offs_n, total.to(dbias_ptr.dtype.element_ty), mask=mask_n)


@dataclass(frozen=True)
class LaunchConfig:
    """How rows of one width and dtype are laid over threads; see the module docstring for the tiles."""

    vector: int  # neighbouring columns of one thread: 128 bits
    fwd_chunks: int
    fwd_rows: int
    fwd_chunk_cols: int
    fwd_num_warps: int
    bwd_repeats: int
    bwd_rows: int
    bwd_block_cols: int
    bwd_num_warps: int
    bwd_programs_per_multiprocessor: int


@functools.cache
def launch_config(hidden_size: int, dtype: torch.dtype) -> LaunchConfig:
    """The configuration for rows of `hidden_size` columns, 1 to 8,192, of fp32, fp16 or bf16."""
    vector = vector_elements(dtype)
    warp_cols = _WARP * vector  # columns that a warp loads at once

    # Forward: a row belongs to one warp as long as its threads can hold it, so that its sums need neither shared memory
    # nor a barrier; four warps make a program. H = 768 is 3 chunks of 256 bf16 columns: the fourth, which the power of
    # two demands, is known to be masked at compile time and costs nothing. H = 384 is 3 chunks of 128, two rows to a
    # warp, rather than 1.5 chunks of 256. Rows narrower than that are one chunk.
    warps_per_row = next_power_of_2(ceil_div(hidden_size, _WARP * _FORWARD_ELEMENTS))
    if warps_per_row > 1:
        chunk_cols = warp_cols * warps_per_row
    elif hidden_size <= warp_cols // 2:
        chunk_cols = max(vector, next_power_of_2(hidden_size))
    else:
        wide, narrow = warp_cols, warp_cols // 2
        padded = {cols: ceil_div(hidden_size, cols) * cols for cols in (wide, narrow)}
        chunk_cols = narrow if padded[narrow] < padded[wide] else wide
    fwd_num_warps = max(4, warps_per_row)

    # Backward: a row is spread as widely as its vectors allow, since every column that a thread owns costs it three
    # partial sums. Wide rows take more warps, so that fewer, larger programs write fewer partial sums.
    block_cols = max(vector, next_power_of_2(hidden_size))
    bwd_num_warps = 4 if block_cols < 1024 else 8 if block_cols <= 4096 else 16
    bwd_threads = bwd_num_warps * _WARP
    bwd_rows = max(1, bwd_threads * vector // block_cols)
    # Several rows to a thread share the reduction's barriers and keep more loads in flight.
    bwd_repeats = max(1, _BACKWARD_ELEMENTS * bwd_threads // (bwd_rows * block_cols))

    return LaunchConfig(
        vector=vector,
        fwd_chunks=next_power_of_2(ceil_div(hidden_size, chunk_cols)),
        fwd_rows=max(1, fwd_num_warps * warp_cols // chunk_cols),
        fwd_chunk_cols=chunk_cols,
        fwd_num_warps=fwd_num_warps,
        bwd_repeats=bwd_repeats,
        bwd_rows=bwd_rows,
        bwd_block_cols=block_cols,
        bwd_num_warps=bwd_num_warps,
        bwd_programs_per_multiprocessor=_RESIDENT_WARPS // bwd_num_warps,
    )


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
    """Launches the forward kernel; arguments and results as in `reference/dropout_add_layer_norm.py`.

    x, residual [T, H] of fp32, fp16 or bf16, H <= 8,192; rows anywhere in memory, a copy is made where neighbouring
    columns are not neighbours. Returns new, contiguous tensors.
    """
    x, residual = unit_stride(x), unit_stride(residual)
    num_rows, hidden_size = x.shape
    y, h = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    mean, rstd = (torch.empty(num_rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if num_rows == 0:
        return y, h, mean, rstd
    config = launch_config(hidden_size, x.dtype)
    has_dropout = dropout_threshold(dropout_p) > 0
    drop_max, scale = dropout_arguments(dropout_p)
    if has_dropout:
        assert seed is not None and coords is not None
        coords = coords.contiguous()
    grid = (ceil_div(num_rows, config.fwd_rows),)
    with torch.cuda.device_of(x):
        _dropout_add_layer_norm_fwd_kernel[grid](
            x,
            residual,
            x_bias,
            weight.contiguous(),
            bias.contiguous(),
            seed if has_dropout else None,
            coords if has_dropout else None,
            y,
            h,
            mean,
            rstd,
            x.stride(0),
            residual.stride(0),
            num_rows,
            eps,
            scale,
            drop_max,
            site,
            N_COLS=hidden_size,
            CHUNKS=config.fwd_chunks,
            ROWS=config.fwd_rows,
            CHUNK_COLS=config.fwd_chunk_cols,
            VECTOR=config.vector,
            HAS_X_BIAS=x_bias is not None,
            HAS_DROPOUT=has_dropout,
            num_warps=config.fwd_num_warps,
            enable_fp_fusion=True,  # residual + branch * scale, centred * rstd * weight + bias
        )
    return y, h, mean, rstd


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
    """Launches the two backward stages; arguments and results as in `reference/dropout_add_layer_norm.py`.

    dy, h [T, H] as x in forward. dx and dresidual are one tensor where nothing is dropped (p below 2**-17).
    """
    dy, h = unit_stride(dy), unit_stride(h)
    num_rows, hidden_size = h.shape
    has_dropout = dropout_threshold(dropout_p) > 0
    dresidual = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    dx = torch.empty_like(dresidual) if has_dropout else dresidual
    if num_rows == 0:
        dx_bias, dweight, dbias = (torch.zeros_like(weight) for _ in range(3))
        return dx, dresidual, dx_bias, dweight, dbias
    dx_bias, dweight, dbias = (torch.empty(hidden_size, dtype=weight.dtype, device=h.device) for _ in range(3))
    config = launch_config(hidden_size, h.dtype)
    # As many programs as run at once, fewer where the same number of rounds takes fewer: less to reduce.
    num_tiles = ceil_div(num_rows, config.bwd_repeats * config.bwd_rows)
    resident = num_multiprocessors(h.device) * config.bwd_programs_per_multiprocessor
    num_programs = ceil_div(num_tiles, ceil_div(num_tiles, resident))
    partial = torch.empty(num_programs, 3, hidden_size, dtype=torch.float32, device=h.device)
    drop_max, scale = dropout_arguments(dropout_p)
    if has_dropout:
        assert seed is not None and coords is not None
        coords = coords.contiguous()
    with torch.cuda.device_of(h):
        _dropout_add_layer_norm_bwd_kernel[(num_programs,)](
            dy,
            h,
            mean,
            rstd,
            weight.contiguous(),
            seed if has_dropout else None,
            coords if has_dropout else None,
            dx if has_dropout else None,
            dresidual,
            partial,
            dy.stride(0),
            h.stride(0),
            num_rows,
            scale,
            drop_max,
            site,
            N_COLS=hidden_size,
            REPEATS=config.bwd_repeats,
            ROWS=config.bwd_rows,
            BLOCK_COLS=config.bwd_block_cols,
            VECTOR=config.vector,
            HAS_DROPOUT=has_dropout,
            num_warps=config.bwd_num_warps,
            enable_fp_fusion=True,  # g - mean(g) - n * mean(g n), and the running sums
        )
        # 32 columns are 128 bytes of each row of partial sums; 256 rows at once because latency is what costs here.
        block_partials, block_cols = 256, 32
        _dropout_add_layer_norm_bwd_reduce_kernel[(ceil_div(hidden_size, block_cols), 3)](
            partial,
            dx_bias,
            dweight,
            dbias,
            num_programs,
            N_COLS=hidden_size,
            BLOCK_PARTIALS=block_partials,
            BLOCK_COLS=block_cols,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return dx, dresidual, dx_bias, dweight, dbias
