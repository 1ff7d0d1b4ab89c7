"""y = act(x + bias) in Triton, forward and backward; act is GELU (erf or tanh), ReLU, SiLU or tanh.

Forward:   y = act(x + bias)
Backward:  dx = dy * act'(x + bias);   dbias = sum over rows of dx

x + bias is computed again in backward, in fp32: nothing but x itself is saved. The activations, their precision and
their sources are in `_activations.py`; derivation in docs/kernels/bias_gelu.md.

Shapes: x, y, dy, dx [T, N]; bias, dbias [N].
Bytes moved per element of e bytes (the floor, and what the kernels do; bias comes from cache):
    forward   reads x: e; writes y: e
    backward  reads dy, x: 2 e; writes dx: e
    backward, once per program: 4 bytes of partial sums for each of its columns, read again by the second stage
Precision: loads are widened to fp32 at once; all arithmetic and sums are fp32; outputs round once. Activations are
evaluated below 0.05 units in the last place of a half-precision output, in fp32 as PyTorch does.
Determinism: no atomics; partial sums are added in a fixed order that depends on T and the device alone.

A program owns a block of columns and walks over rows: it reads its part of bias once and keeps the sums for dbias in
registers. The columns of a block lie across the threads of the program, 128 bits each, and the rows of a tile in the
registers of each thread, so a sum over rows needs no exchange.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.triton._activations import activation, activation_derivative
from bert_fast.triton._column_sums import column_sums
from bert_fast.triton._launch import ceil_div, persistent_programs, unit_stride
from bert_fast.triton._launch_plan import launch_plan

# config.hidden_act -> the name in _activations.py
_ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@triton.jit
def _block(N_COLS: tl.constexpr, COLS: tl.constexpr):
    """(columns [1, COLS] of this program, its first group of rows, the step from group to group)."""
    n_blocks: tl.constexpr = (N_COLS + COLS - 1) // COLS
    col = tl.program_id(0) % n_blocks * COLS + tl.arange(0, COLS)[None, :]
    return col, tl.program_id(0) // n_blocks, tl.num_programs(0) // n_blocks


@triton.jit
def _load_columns(ptr, col, N_COLS: tl.constexpr, COLS: tl.constexpr):
    """What ptr [N_COLS] holds at these columns, in fp32."""
    return tl.load(ptr + col, mask=col < N_COLS, other=0.0).to(tl.float32)


@triton.jit
def _load_tile(ptr, row_start, col, mask_row, N_COLS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr):
    """A tile [ROWS, COLS] in fp32, 0 where masked; row_start (int64 [ROWS, 1]) is where rows begin.

    Accesses are 128 bits wide where rows start at whole vectors. That does not take a whole number of vectors in a row:
    blocks that lie inside the row need no mask over columns.
    """
    if N_COLS % COLS == 0:
        tile = tl.load(ptr + row_start + col, mask=mask_row, other=0.0)
    elif N_COLS % VECTOR == 0:
        tile = tl.load(ptr + row_start + col, mask=mask_row & (col < N_COLS), other=0.0)
    elif tl.program_id(0) % ((N_COLS + COLS - 1) // COLS) < N_COLS // COLS:
        tile = tl.load(ptr + row_start + col, mask=mask_row, other=0.0)
    else:
        tile = tl.load(ptr + row_start + col, mask=mask_row & (col < N_COLS), other=0.0)
    return tile.to(tl.float32)


@triton.jit(do_not_specialize=["x_row_stride", "n_rows"])
def _bias_gelu_fwd_kernel(
    x_ptr,
    bias_ptr,
    y_ptr,
    x_row_stride,
    n_rows,
    ACTIVATION: tl.constexpr,
    N_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Every num_programs-th group of ROWS rows of one block of COLS columns."""
    col, first, step = _block(N_COLS, COLS)
    tile_row = tl.arange(0, ROWS)[:, None].to(tl.int64)  # offsets pass 2^31 where row numbers do not
    if HAS_BIAS:
        bias = _load_columns(bias_ptr, col, N_COLS, COLS)
    for group in tl.range(first, tl.cdiv(n_rows, ROWS), step):
        row = group * ROWS + tile_row
        mask_row = row < n_rows
        # Strides count STRIDE_UNIT elements, so that Triton sees rows start at whole vectors.
        x = _load_tile(x_ptr, row * x_row_stride * STRIDE_UNIT, col, mask_row, N_COLS, COLS, VECTOR)
        if HAS_BIAS:
            x += bias
        y = activation(x, ACTIVATION, y_ptr.dtype.element_ty).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * N_COLS + col, y, mask=mask_row & (col < N_COLS))


@triton.jit(do_not_specialize=["dy_row_stride", "x_row_stride", "n_rows"])
def _bias_gelu_bwd_kernel(
    dy_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    partial_ptr,
    dy_row_stride,
    x_row_stride,
    n_rows,
    ACTIVATION: tl.constexpr,
    N_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Every num_programs-th group of ROWS rows of one block of COLS columns, then the sums over its rows.

    partial (fp32 [programs of a block, N_COLS]) takes the sums for dbias.
    """
    col, first, step = _block(N_COLS, COLS)
    tile_row = tl.arange(0, ROWS)[:, None].to(tl.int64)  # offsets pass 2^31 where row numbers do not
    if HAS_BIAS:
        bias = _load_columns(bias_ptr, col, N_COLS, COLS)
        dbias = tl.zeros([ROWS, COLS], tl.float32)
    # Masks hoisted out of the loop make ptxas spill two registers for tanh-GELU on sm_100.
    calm: tl.constexpr = ACTIVATION == "gelu_tanh"
    for group in tl.range(first, tl.cdiv(n_rows, ROWS), step, disable_licm=calm):
        row = group * ROWS + tile_row
        mask_row = row < n_rows
        dy = _load_tile(dy_ptr, row * dy_row_stride * STRIDE_UNIT, col, mask_row, N_COLS, COLS, VECTOR)
        x = _load_tile(x_ptr, row * x_row_stride * STRIDE_UNIT, col, mask_row, N_COLS, COLS, VECTOR)
        if HAS_BIAS:
            x += bias
        dx = dy * activation_derivative(x, ACTIVATION, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row * N_COLS + col, dx.to(dx_ptr.dtype.element_ty), mask=mask_row & (col < N_COLS))
        if HAS_BIAS:
            dbias += dx  # rows past the last add 0: there dy is 0 and x is bias
    if HAS_BIAS:
        total = tl.sum(dbias, 0, keep_dims=True)
        tl.store(partial_ptr + first.to(tl.int64) * N_COLS + col, total, mask=col < N_COLS)


# Four warps cover a block of 512 columns in one or two rows of 128-bit accesses. Below 128 columns (256 bytes of bf16)
# the accesses of a warp would be scattered over many rows.
_THREADS, _MAX_COLS, _MIN_COLS = 128, 512, 128


@dataclass(frozen=True)
class LaunchConfig:
    """Tiles [rows, cols] of the two kernels, and how many programs a multiprocessor should hold."""

    vector: int  # neighbouring columns of one thread, 128 bits: 8 of bf16 and fp16, 4 of fp32
    cols: int
    forward_rows: int
    backward_rows: int
    num_warps: int = _THREADS // 32
    forward_programs_per_multiprocessor: int = 8  # of up to 64 registers a thread
    backward_programs_per_multiprocessor: int = 6  # of up to 80 registers


@functools.cache
def launch_config(num_cols: int, dtype: torch.dtype) -> LaunchConfig:
    """The configuration for `num_cols` columns of fp32, fp16 or bf16."""
    vector = 16 // dtype.itemsize
    # The widest blocks that pad the row by a sixteenth at most, else those that pad it least.
    widest = min(_MAX_COLS, 1 << (num_cols - 1).bit_length())
    sizes = [widest >> shift for shift in range(3) if widest >> shift >= min(_MIN_COLS, widest)]
    cols = min(sizes, key=lambda size: (max(ceil_div(num_cols, size) * size, num_cols * 17 // 16), -size))
    # Four vectors a thread and tensor in forward, two in backward, where two tensors are read and sums take registers.
    row_of_vectors = max(1, _THREADS * vector // cols)
    return LaunchConfig(vector, cols, 4 * row_of_vectors, 2 * row_of_vectors)


def bias_gelu_fwd(a: BiasGelu) -> Tensor:
    """Launches the forward kernel: y, as `reference.bias_gelu`.

    x [T, N] of fp32, fp16 or bf16; rows anywhere in memory, a copy is made where neighbouring columns are not
    neighbours. Returns a new, contiguous tensor.
    """
    x, bias = unit_stride(a.x), a.bias
    num_rows, num_cols = x.shape
    y = x.new_empty(x.shape)
    if num_rows == 0:
        return y
    config = launch_config(num_cols, x.dtype)
    num_groups, num_blocks = ceil_div(num_rows, config.forward_rows), ceil_div(num_cols, config.cols)
    programs = persistent_programs(num_groups, config.forward_programs_per_multiprocessor, x.device, num_blocks)
    stride_unit = math.gcd(config.vector, x.stride(0))
    launch_plan(
        _bias_gelu_fwd_kernel,
        ACTIVATION=_ACTIVATIONS[a.hidden_act],
        N_COLS=num_cols,
        ROWS=config.forward_rows,
        COLS=config.cols,
        VECTOR=config.vector,
        STRIDE_UNIT=stride_unit,
        HAS_BIAS=bias is not None,
        num_warps=config.num_warps,
        enable_fp_fusion=True,  # Horner's rule, logits
    )(
        (programs * num_blocks,),
        (x, bias.contiguous() if bias is not None else None, y),
        (x.stride(0) // stride_unit, num_rows),
    )
    return y


def bias_gelu_bwd(a: BiasGelu, dy: Tensor) -> dict[str, Tensor]:
    """Launches the two backward stages: gradients by name, as `reference.bias_gelu`; dy, x as in forward."""
    dy, x, bias = unit_stride(dy), unit_stride(a.x), a.bias
    num_rows, num_cols = x.shape
    dx = x.new_empty(x.shape)
    if num_rows == 0:
        return {"x": dx} if bias is None else {"x": dx, "bias": torch.zeros_like(bias)}
    config = launch_config(num_cols, x.dtype)
    num_groups, num_blocks = ceil_div(num_rows, config.backward_rows), ceil_div(num_cols, config.cols)
    programs = persistent_programs(num_groups, config.backward_programs_per_multiprocessor, x.device, num_blocks)
    partial = None
    if bias is not None:
        partial = x.new_empty((programs, 1, num_cols), dtype=torch.float32)
    stride_unit = math.gcd(config.vector, dy.stride(0), x.stride(0))
    launch_plan(
        _bias_gelu_bwd_kernel,
        ACTIVATION=_ACTIVATIONS[a.hidden_act],
        N_COLS=num_cols,
        ROWS=config.backward_rows,
        COLS=config.cols,
        VECTOR=config.vector,
        STRIDE_UNIT=stride_unit,
        HAS_BIAS=bias is not None,
        num_warps=config.num_warps,
        enable_fp_fusion=True,  # Horner's rule, logits
    )(
        (programs * num_blocks,),
        (dy, x, bias.contiguous() if bias is not None else None, dx, partial),
        (dy.stride(0) // stride_unit, x.stride(0) // stride_unit, num_rows),
    )
    return {"x": dx} if partial is None else {"x": dx, "bias": column_sums(partial, bias.dtype)[0]}
