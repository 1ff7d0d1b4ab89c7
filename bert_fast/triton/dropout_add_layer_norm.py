"""y = LayerNorm(residual + dropout(x + x_bias)) in Triton, forward and backward.

Forward, per row of H columns:
    h    = residual + (x + x_bias) * m          m = scale where kept, else 0; 1 without dropout
    mean = sum(h) / H;   rstd = 1 / sqrt(sum((h - mean)^2) / H + eps)
    n    = (h - mean) * rstd;   y = n * weight + bias

Backward, with n = (y - bias) / weight, or from h where `saves` says so, and g = dy * weight:
    dresidual = rstd * (g - sum(g) / H - n * sum(g * n) / H);   dx = dresidual * m
    dx_bias = sum over rows of dx;   dweight = sum of dy * n;   dbias = sum of dy

Source: Ba et al. 2016 (arXiv:1607.06450), section 3; derivation in docs/kernels/dropout_add_layer_norm.md.

Shapes: x, residual, y, h, dy, dx, dresidual [T, H]; x_bias, weight, bias and their gradients [H]; mean, rstd [T].
Bytes moved per row, with elements of e bytes (the floor, and what the kernels do; parameters come from cache):
    forward   reads x, residual, coords: 2 H e + 8; writes y, mean, rstd: H e + 8
    backward  reads dy, y, rstd, coords: 2 H e + 12; writes dx, dresidual: 2 H e (H e without dropout)
    backward, once per program: 12 H bytes of partial sums written, and read again by the second stage
    where backward reads h: forward writes h, H e more; backward reads h in place of y, and mean, 4 more
Saved: y (the output itself), rstd; or h, mean, rstd; with "again" neither h, which backward is given, nor mean, which
it computes. `saves` as in the reference; "device", what the op asks for on a GPU, is decided by every program from
weight and bias, with the same answer. Recomputed: n; the mask, from the seed.
Precision: loads are widened to fp32 at once; statistics, sums and all arithmetic are fp32; outputs round once. Where h
is stored, statistics are those of h as stored.
Determinism: no atomics; partial sums are added in a fixed order that depends on T and the device alone.

Tiles are [CHUNKS, ROWS, CHUNK_COLS], as `_launch.py:RowTile` explains: a row belongs to one warp, or few. Programs are
persistent, as many as run at once: what concerns no row (parameters, seed) is looked at once a program.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.reference.dropout_add_layer_norm import (
    AGAIN,
    MAX_WEIGHT,
    MIN_WEIGHT,
    SAVES,
    DropoutAddLayerNorm,
    max_shift,
)
from bert_fast.triton._column_sums import column_sums
from bert_fast.triton._launch import (
    RowTile,
    architecture,
    ceil_div,
    dropout_arguments,
    persistent_programs,
    row_tile,
    unit_stride,
)
from bert_fast.triton._launch_plan import LaunchPlan, launch_plan
from bert_fast.triton._layer_norm import layer_norm_backward, mean_of_rows, normalise, store_of_rows
from bert_fast.triton._math import keep_values, row_major, split_seed
from bert_fast.triton._summing_programs import summing_programs


@dataclass(frozen=True)
class LaunchConfig:
    """How rows of one width and dtype are laid over threads, and how many programs a multiprocessor holds at once."""

    forward: RowTile
    forward_programs_per_multiprocessor: int
    backward: RowTile
    backward_programs_per_multiprocessor: int
    few_registers: bool  # of backward
    backward_stages: int  # rounds whose loads are in flight
    keeps_h: bool  # where `saves` leaves the choice


@functools.cache
def launch_config(hidden_size: int, dtype: torch.dtype, name: str) -> LaunchConfig:
    """For rows of 1 to 8,192 columns of fp32, fp16 or bf16; name: of the processor, by `_launch.architecture`."""
    # Forward: 32 elements of a row in a thread make a row of 1,024 the business of one warp, whose sums need neither
    # shared memory nor a barrier. Up to 24 take at most 80 registers, 32 take 104, fp32 up to 168: 20, 16 or 12 warps
    # to a multiprocessor (65,536 registers). Even these keep 60 KB of loads in flight, several times what the latency
    # of memory asks for.
    forward = row_tile(hidden_size, dtype, max_elements=32, best_elements=32)
    forward_elements = ceil_div(hidden_size, forward.chunk_cols) * forward.vector
    forward_warps = 12 if dtype == torch.float32 else 16 if forward_elements > 24 else 20
    # Backward: an element also costs a thread three running sums and the inverse of its weight. 24 fill the registers
    # without spilling (H = 768: a row to a warp); 32 do not, so H = 1,024 takes two warps to a row. With 8 to a thread
    # there are 20 warps and room to load two rows ahead, of up to 768 columns, or one, for barriers and more
    # instructions: an H200 takes 0.7 to 0.85 of the time at H = 768, 0.87 at 1,024
    # (docs/kernels/dropout_add_layer_norm.md). Measured there alone.
    is_fp32 = dtype == torch.float32
    loads_ahead = name == "sm_90" and not is_fp32 and 512 < hidden_size <= 1024
    most, best = (8, 8) if loads_ahead else (24, 16)
    backward = row_tile(hidden_size, dtype, max_elements=most, best_elements=best)
    elements = ceil_div(hidden_size, backward.chunk_cols) * backward.vector
    # Warps that the register file holds: 8 of up to 255, 12 of up to 168, 20 of up to 96. More programs would run in a
    # second, nearly empty round. The ahead-of-time gate checks the registers behind this, and those of forward.
    backward_warps = 20 if loads_ahead else 8 if elements > 16 else 12
    # 512 threads to a row, as of 4,097 columns, have 128 registers each. fp32 has instructions to spare: an element
    # leaves time for twice as many as in half precision. Together there is no room to recover n.
    is_wide = backward.num_warps >= 16
    return LaunchConfig(
        forward,
        max(1, forward_warps // forward.num_warps),
        backward,
        max(1, backward_warps // backward.num_warps),
        few_registers=is_wide or (is_fp32 and elements >= 16),
        backward_stages=1 if not loads_ahead else 3 if hidden_size <= 768 else 2,
        keeps_h=is_wide and is_fp32,
    )


_GRADIENTS = ("x", "residual", "x_bias", "weight", "bias")
_MIN_WEIGHT = tl.constexpr(MIN_WEIGHT)
_MAX_WEIGHT = tl.constexpr(MAX_WEIGHT)
_MAX_SHIFT_FP32 = tl.constexpr(max_shift(torch.float32))
_MAX_SHIFT_HALF = tl.constexpr(max_shift(torch.bfloat16))


@triton.jit
def _output_suffices(weight_ptr, bias_ptr, dtype: tl.constexpr, N_COLS: tl.constexpr, PARAM_COLS: tl.constexpr):
    """`output_suffices` of the reference: one bool. dtype: of y; PARAM_COLS: a power of two, not below N_COLS."""
    col = tl.arange(0, PARAM_COLS)
    size = tl.abs(tl.load(weight_ptr + col, mask=col < N_COLS, other=1.0).to(tl.float32))
    shift = tl.abs(tl.load(bias_ptr + col, mask=col < N_COLS, other=0.0).to(tl.float32))
    max_shift: tl.constexpr = _MAX_SHIFT_FP32 if dtype == tl.float32 else _MAX_SHIFT_HALF
    suffices = (size >= _MIN_WEIGHT) & (size <= _MAX_WEIGHT) & (shift <= size * max_shift)
    return tl.min(suffices.to(tl.int32), 0) == 1


@triton.jit(do_not_specialize=["x_row_stride", "residual_row_stride", "param_row_stride", "n_rows", "drop_max", "site"])
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
    param_row_stride,
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
    STRIDE_UNIT: tl.constexpr,
    SAVES: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Every num_programs-th group of ROWS rows."""
    chunk_start = tl.arange(0, CHUNKS)[:, None, None] * CHUNK_COLS  # [CHUNKS, 1, 1]
    col = chunk_start + tl.arange(0, CHUNK_COLS)[None, None, :]  # [CHUNKS, 1, CHUNK_COLS]
    mask_col = col < N_COLS
    vector_col = (chunk_start + tl.arange(0, CHUNK_COLS // VECTOR)[None, None, :] * VECTOR).to(tl.uint32)
    tile_row = tl.arange(0, ROWS)[None, :, None].to(tl.int64)  # [1, ROWS, 1]; offsets pass 2^31, row numbers do not
    # Parameters are addressed as tensors [T, H] of row stride 0. The stride is an argument, so that Triton does not see
    # the 0: it then loads parameters in the layout of x, whatever their dtype. A tile without rows would get a layout
    # of its own and be exchanged.
    param_col = tile_row * param_row_stride * STRIDE_UNIT + col
    stores_h = SAVES == "input"  # becomes a value of the kernel; the compiler removes a branch that is never taken
    if SAVES == "device":
        stores_h = not _output_suffices(weight_ptr, bias_ptr, y_ptr.dtype.element_ty, N_COLS, CHUNKS * CHUNK_COLS)
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))

    # Hoisting what does not change out of the loop spills: half-precision parameters on Triton 3.6, wide rows on 3.9.
    calm: tl.constexpr = weight_ptr.dtype.element_ty != tl.float32 or N_COLS > 1024
    for group in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), disable_licm=calm):
        row = group * ROWS + tile_row
        mask_row = row < n_rows
        mask = mask_row & mask_col
        # Strides count STRIDE_UNIT elements: seeing the factor, Triton knows that rows start at whole vectors. Alone,
        # it looks for multiples of 16 only, and would load single elements where H is 312.
        branch = tl.load(
            row_major(x_ptr, row * x_row_stride * STRIDE_UNIT + col, STRIDE_UNIT), mask=mask, other=0.0
        ).to(tl.float32)
        h = tl.load(
            row_major(residual_ptr, row * residual_row_stride * STRIDE_UNIT + col, STRIDE_UNIT), mask=mask, other=0.0
        )
        h = h.to(tl.float32)
        if HAS_X_BIAS:
            branch += tl.load(row_major(x_bias_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
        if HAS_DROPOUT:
            batch_row = tl.load(coords_ptr + row * 2, mask=mask_row, other=0).to(tl.uint32)
            position = tl.load(coords_ptr + row * 2 + 1, mask=mask_row, other=0).to(tl.uint32)
            keep = keep_values(
                k0, k1, site.to(tl.uint32), batch_row, position, vector_col, drop_max.to(tl.uint32), VECTOR
            )
            # Selecting before scaling lets the multiplication and the addition become one instruction, and keeps a
            # dropped infinity out of the sum.
            h += tl.where(keep, branch, 0.0) * scale
        else:
            h += branch
        if stores_h:
            # Statistics are then those of h as it is stored: backward sees no other, and in a row of tiny variance the
            # difference would be multiplied by a huge rstd.
            stored_h = h.to(h_ptr.dtype.element_ty)
            tl.store(row_major(h_ptr, row * N_COLS + col, N_COLS), stored_h, mask=mask)
            h = stored_h.to(tl.float32)

        centred, mean, rstd = normalise(h, mask_col, eps, N_COLS)
        weight = tl.load(row_major(weight_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
        bias = tl.load(row_major(bias_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
        y = centred * rstd * weight + bias
        tl.store(row_major(y_ptr, row * N_COLS + col, N_COLS), y.to(y_ptr.dtype.element_ty), mask=mask)
        if mean_ptr is not None:
            store_of_rows(mean_ptr, row, mean, mask_row, CHUNK_COLS // VECTOR)
        store_of_rows(rstd_ptr, row, rstd, mask_row, CHUNK_COLS // VECTOR)


@triton.jit(do_not_specialize=["dy_row_stride", "param_row_stride", "n_rows", "drop_max", "site"])
def _dropout_add_layer_norm_bwd_kernel(
    dy_ptr,
    y_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    coords_ptr,
    dx_ptr,
    dresidual_ptr,
    partial_ptr,
    dy_row_stride,
    param_row_stride,
    n_rows,
    scale,
    drop_max,
    site,
    N_COLS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    SAVES: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    FEW_REGISTERS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Every num_programs-th group of ROWS rows, then the program's sums over its rows.

    partial (fp32 [num_programs, 3, N_COLS]) takes the sums for dx_bias, dweight and dbias. FEW_REGISTERS: compute again
    in every round what could be computed once and held.
    """
    chunk_start = tl.arange(0, CHUNKS)[:, None, None] * CHUNK_COLS  # [CHUNKS, 1, 1]
    col = chunk_start + tl.arange(0, CHUNK_COLS)[None, None, :]  # [CHUNKS, 1, CHUNK_COLS]
    mask_col = col < N_COLS
    vector_col = (chunk_start + tl.arange(0, CHUNK_COLS // VECTOR)[None, None, :] * VECTOR).to(tl.uint32)
    tile_row = tl.arange(0, ROWS)[None, :, None].to(tl.int64)  # [1, ROWS, 1]; offsets pass 2^31, row numbers do not
    param_col = tile_row * param_row_stride * STRIDE_UNIT + col  # as in forward
    # One pointer to what forward kept, so that no load waits for a branch.
    reads_y = SAVES == "output"
    if SAVES == "device":
        reads_y = _output_suffices(weight_ptr, bias_ptr, y_ptr.dtype.element_ty, N_COLS, CHUNKS * CHUNK_COLS)
        kept_ptr = y_ptr if reads_y else h_ptr
    elif SAVES == "output":
        kept_ptr = y_ptr
    else:
        kept_ptr = h_ptr
    inverse = 0.0
    if SAVES != "input" and not FEW_REGISTERS:
        inverse = 1.0 / tl.load(row_major(weight_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=1.0).to(tl.float32)
    if HAS_DROPOUT and not FEW_REGISTERS:
        k0, k1 = split_seed(tl.load(seed_ptr))
    dx_bias = tl.zeros([CHUNKS, ROWS, CHUNK_COLS], tl.float32)
    dweight = tl.zeros([CHUNKS, ROWS, CHUNK_COLS], tl.float32)
    dbias = tl.zeros([CHUNKS, ROWS, CHUNK_COLS], tl.float32)

    for group in tl.range(
        tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES, disable_licm=FEW_REGISTERS
    ):
        row = group * ROWS + tile_row
        mask_row = row < n_rows
        mask = mask_row & mask_col
        dy = tl.load(row_major(dy_ptr, row * dy_row_stride * STRIDE_UNIT + col, STRIDE_UNIT), mask=mask, other=0.0).to(
            tl.float32
        )
        kept = tl.load(row_major(kept_ptr, row * N_COLS + col, N_COLS), mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=mask_row, other=0.0)
        # In masked columns dy is 0, hence g, and what n holds there enters no sum.
        if reads_y:
            bias = tl.load(row_major(bias_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
            if FEW_REGISTERS:
                divisor = tl.load(row_major(weight_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=1.0).to(
                    tl.float32
                )
                n = (kept - bias) / divisor
            else:
                n = (kept - bias) * inverse
        else:
            if mean_ptr is not None:
                mean = tl.load(mean_ptr + row, mask=mask_row, other=0.0)
            else:
                mean = mean_of_rows(kept, N_COLS)
            n = (kept - mean) * rstd
        # From cache: registers are for the sums. 1 in masked columns, where it divides.
        weight = tl.load(row_major(weight_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=1.0).to(tl.float32)
        # The selections tell the compiler that the sums of a chunk past the last column stay 0: it then gives them no
        # registers. Rows past the last add 0 by themselves: there dy and rstd are 0.
        dweight += tl.where(mask_col, dy * n, 0.0)
        dbias += tl.where(mask_col, dy, 0.0)
        g = dy * weight
        dresidual = layer_norm_backward(g, n, rstd, N_COLS)
        tl.store(
            row_major(dresidual_ptr, row * N_COLS + col, N_COLS),
            dresidual.to(dresidual_ptr.dtype.element_ty),
            mask=mask,
        )
        if HAS_DROPOUT:
            if FEW_REGISTERS:
                k0, k1 = split_seed(tl.load(seed_ptr))
            batch_row = tl.load(coords_ptr + row * 2, mask=mask_row, other=0).to(tl.uint32)
            position = tl.load(coords_ptr + row * 2 + 1, mask=mask_row, other=0).to(tl.uint32)
            keep = keep_values(
                k0, k1, site.to(tl.uint32), batch_row, position, vector_col, drop_max.to(tl.uint32), VECTOR
            )
            dx = tl.where(keep, dresidual, 0.0) * scale
            tl.store(row_major(dx_ptr, row * N_COLS + col, N_COLS), dx.to(dx_ptr.dtype.element_ty), mask=mask)
        else:
            dx = dresidual
        dx_bias += tl.where(mask_col, dx, 0.0)

    sum_col = tl.arange(0, CHUNKS)[:, None] * CHUNK_COLS + tl.arange(0, CHUNK_COLS)[None, :]  # [CHUNKS, CHUNK_COLS]
    sum_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * (3 * N_COLS) + sum_col
    tl.store(sum_ptr, tl.sum(dx_bias, 1), mask=sum_col < N_COLS)
    tl.store(sum_ptr + N_COLS, tl.sum(dweight, 1), mask=sum_col < N_COLS)
    tl.store(sum_ptr + 2 * N_COLS, tl.sum(dbias, 1), mask=sum_col < N_COLS)


def _chosen(saves: str, config: LaunchConfig) -> str:
    """What a call that says `saves` does in this configuration, forward and backward."""
    saves = "device" if saves == AGAIN else saves
    return "input" if saves == "device" and config.keeps_h else saves


@functools.lru_cache(maxsize=1024)
def _forward(
    hidden_size: int, dtype: torch.dtype, name: str, strides: tuple[int, ...], saves: str, has_x_bias: bool,
    has_dropout: bool,
) -> tuple[LaunchPlan, LaunchConfig, tuple[int, ...]]:  # fmt: skip
    """The plan, the configuration, and strides as the kernel counts them."""
    config = launch_config(hidden_size, dtype, name)
    stride_unit = math.gcd(config.forward.vector, *strides)
    plan = launch_plan(
        _dropout_add_layer_norm_fwd_kernel,
        N_COLS=hidden_size,
        **config.forward.constants,
        STRIDE_UNIT=stride_unit,
        SAVES=_chosen(saves, config),
        HAS_X_BIAS=has_x_bias,
        HAS_DROPOUT=has_dropout,
        num_warps=config.forward.num_warps,
        enable_fp_fusion=True,  # residual + branch * scale, centred * rstd * weight + bias
    )
    return plan, config, tuple(stride // stride_unit for stride in strides)


def dropout_add_layer_norm_fwd(a: DropoutAddLayerNorm) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Launches the forward kernel: (y, h, mean, rstd), as `reference.dropout_add_layer_norm`.

    x, residual [T, H] of fp32, fp16 or bf16, H <= 8,192; copied where neighbouring columns are not neighbours.
    """
    assert a.saves in (*SAVES, AGAIN)
    x, residual = unit_stride(a.x), unit_stride(a.residual)
    num_rows, hidden_size = x.shape
    y = x.new_empty(x.shape)
    h = None if a.saves in ("output", AGAIN) else torch.empty_like(y)
    rstd = x.new_empty(num_rows, dtype=torch.float32)
    mean = None if a.saves == AGAIN else torch.empty_like(rstd)
    if num_rows == 0:
        return y, h, mean, rstd
    seed, coords, drop_max, scale = dropout_arguments(a.dropout_p, a.seed, a.coords)
    strides, x_bias = (x.stride(0), residual.stride(0)), a.x_bias
    plan, config, strides = _forward(
        hidden_size, x.dtype, architecture(x.device), strides, a.saves, x_bias is not None, coords is not None
    )
    num_groups = ceil_div(num_rows, config.forward.rows)
    plan(
        (persistent_programs(num_groups, config.forward_programs_per_multiprocessor, x.device),),
        (
            x, residual, x_bias if x_bias is None else x_bias.contiguous(), a.weight.contiguous(), a.bias.contiguous(),
            seed, coords, y,
            y if h is None else h,  # of AGAIN it is stored, to be rounded: by the thread that stores y there
            mean, rstd,
        ),
        (*strides, 0, num_rows, a.eps, scale, drop_max, a.site),
    )  # fmt: skip
    return y, h, mean, rstd


@functools.lru_cache(maxsize=1024)
def _backward(
    hidden_size: int, dtype: torch.dtype, name: str, dy_stride: int, saves: str, has_dropout: bool
) -> tuple[LaunchPlan, LaunchConfig, int]:
    """The plan, the configuration, and the stride as the kernel counts it."""
    config = launch_config(hidden_size, dtype, name)
    stride_unit = math.gcd(config.backward.vector, dy_stride)
    plan = launch_plan(
        _dropout_add_layer_norm_bwd_kernel,
        N_COLS=hidden_size,
        **config.backward.constants,
        STRIDE_UNIT=stride_unit,
        SAVES=_chosen(saves, config),
        HAS_DROPOUT=has_dropout,
        FEW_REGISTERS=config.few_registers,
        STAGES=config.backward_stages,
        num_warps=config.backward.num_warps,
        enable_fp_fusion=True,  # g - mean(g) - n * mean(g n), and the running sums
    )
    return plan, config, dy_stride // stride_unit


def dropout_add_layer_norm_bwd(
    a: DropoutAddLayerNorm, dy: Tensor, y: Tensor | None, h: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> dict[str, Tensor]:
    """Launches the backward kernel and the sum over its programs: gradients by name, as the reference's."""
    assert a.saves in (*SAVES, AGAIN)
    dy, weight = unit_stride(dy), a.weight
    num_rows, hidden_size = dy.shape
    seed, coords, drop_max, scale = dropout_arguments(a.dropout_p, a.seed, a.coords)
    has_dropout = coords is not None
    dresidual = dy.new_empty(dy.shape)
    dx = torch.empty_like(dresidual) if has_dropout else dresidual
    if num_rows == 0:
        sums = [torch.zeros_like(weight) for _ in range(3)]
        return dict(zip(_GRADIENTS, (dx, dresidual, *sums), strict=True))
    plan, config, dy_stride = _backward(
        hidden_size, dy.dtype, architecture(dy.device), dy.stride(0), a.saves, has_dropout
    )
    saves = _chosen(a.saves, config)
    y = None if y is None or saves == "input" else y.contiguous()
    h = None if h is None or saves == "output" else h.contiguous()
    num_groups = ceil_div(num_rows, config.backward.rows)
    num_programs = summing_programs(
        num_groups, config.backward.rows, config.backward_programs_per_multiprocessor, dy.dtype, dy.device
    )
    partial = dy.new_empty((num_programs, 3, hidden_size), dtype=torch.float32)
    plan(
        (num_programs,),
        (
            dy, y, h,
            rstd if mean is None and saves == "output" else mean,  # where it is not read
            rstd, weight.contiguous(), a.bias.contiguous(), seed, coords, dx if has_dropout else None, dresidual,
            partial,
        ),
        (dy_stride, 0, num_rows, scale, drop_max, a.site),
    )  # fmt: skip
    return dict(zip(_GRADIENTS, (dx, dresidual, *column_sums(partial, weight.dtype)), strict=True))
