"""Launches the matrix-product kernels: operands as they lie in memory, tensor descriptors, split products."""

import contextvars
import functools
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from bert_fast.env import SETTINGS
from bert_fast.kernels._gemm_kernel import _gemm_kernel, _gemm_reduce_kernel
from bert_fast.kernels._gemm_table import Tile
from bert_fast.kernels._launch import architecture, ceil_div, kind_of, num_multiprocessors, register_limit
from bert_fast.kernels._launch_plan import LaunchPlan, Window, launch_plan, recorders
from bert_fast.kernels._sizes import smaller

__all__ = ["Epilogue", "has_aligned_rows", "launch", "layout_of", "row_major"]

# Tiles of the second stage of a split product: 4 warps, 16 elements a thread, whole 128-byte lines.
_REDUCE_M, _REDUCE_N = 16, 128
_REDUCE_REGISTERS = 128  # of a thread: ptxas would spill one to get along with 40
# Kinds for which descriptors were compiled and looked at; consumers' sm_120 has the engine, but less memory.
_WITH_COPY_ENGINE = ("sm_90", "sm_100")
_ALIGNMENT = 16  # bytes, of tensor descriptors' bases and strides; as much as one load can be wide


class Epilogue(NamedTuple):
    """What follows the product, in the words of `_gemm_epilogue.py`: y, z and x are [M, N] with rows of neighbours.

    partial: fp32 [row blocks, N] for column sums, made by `launch` where wants_sums is set.
    """

    kind: str
    y: Tensor
    x: Tensor | None = None
    z: Tensor | None = None
    bias: Tensor | None = None
    activation: str = ""
    wants_sums: bool = False


def row_major(t: Tensor) -> tuple[Tensor, bool]:
    """(the matrix or its transpose with neighbours in rows, whether it is the transpose); a copy where neither has."""
    row_stride, col_stride = t.stride()
    if col_stride == 1:
        return t, False
    if row_stride == 1:
        return t.t(), True
    return t.contiguous(), False


def layout_of(a: Tensor, b: Tensor) -> str:
    """BLAS letters of a product: n for an operand as its shape says, t for one that lies transposed."""
    return "".join("t" if row_major(operand)[1] else "n" for operand in (a, b))


def has_aligned_rows(t: Tensor) -> bool:
    """Whether a tensor descriptor can name this row-major matrix: rows of their own that start at whole 16 bytes."""
    rows, cols = t.shape
    row_stride, col_stride = t.stride()
    starts = t.data_ptr() | row_stride * t.element_size()
    return rows > 0 and 0 < cols <= row_stride and col_stride == 1 and starts % _ALIGNMENT == 0


def _precision(dtype: torch.dtype, architecture: str) -> str:
    """How fp32 is multiplied: in TF32 where the user allows it to PyTorch, else as three terms of it where there is."""
    if dtype != torch.float32 or SETTINGS.triton_interpret:  # the interpreter multiplies in fp32
        return "ieee"
    if torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "tf32x3" if architecture.startswith("sm_") else "ieee"


def _with_workspace(device: torch.device, run: Callable[[], object]) -> None:
    """Runs a launch whose kernel makes descriptors; Triton asks the context for memory to keep them in."""
    recorder = recorders.get(threading.get_ident())
    if recorder is not None:
        recorder.spoil()  # a program has no such context
    context = contextvars.copy_context()
    context.run(triton.set_allocator, lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    context.run(run)


class _Form(NamedTuple):
    """What a product's kernels depend on: how operands lie, which sizes are multiples, what follows; not sizes."""

    dtype: torch.dtype
    a_transposed: bool
    b_transposed: bool
    by_copies: bool  # of operands
    results_by_copies: bool
    kind: str
    activation: str
    wants_sums: bool
    tile: Tile
    is_split: bool
    # Masks change at whole vectors along whichever size is contiguous in memory; a copy engine needs no masks.
    m_unit: int
    n_unit: int
    k_unit: int
    even_k: bool
    architecture: str
    precision: str


class _Prepared(NamedTuple):
    """A product's plans. resident: programs of a multiprocessor; tile: as launched."""

    plan: LaunchPlan
    tile: Tile
    resident: int
    needs_workspace: bool
    reduce: LaunchPlan | None


@functools.lru_cache(maxsize=4096)
def _prepare(p: _Form) -> _Prepared:
    tile = p.tile
    # Two groups of warps share a specialized tile, half its rows each; the compiler can't add up columns across them.
    # Nor read another matrix behind the product: of ten products on an H200 one, that accumulates, came out with NaN.
    can_specialize = p.architecture == "sm_90" and p.results_by_copies and not p.is_split and not p.wants_sums
    can_specialize = can_specialize and p.kind in ("plain", "activation")
    is_specialized = tile.warp_specialize and can_specialize
    if tile.warp_specialize and not is_specialized:
        tile = replace(tile, num_warps=8, parts=4)
    first, activation = ("plain", "") if p.is_split else (p.kind, p.activation)
    # fp32 tiles of out, read and written, leave a multiprocessor's shared memory room for one program.
    resident = 1 if first == "accumulate" else tile.resident
    windows: tuple[Window, ...] = ()
    if p.by_copies and not is_specialized:
        result = (tile.block_m, tile.block_n // tile.parts) if p.results_by_copies else None
        of_a, of_b = (tile.block_m, tile.block_k), (tile.block_k, tile.block_n)
        windows = (
            of_a[::-1] if p.a_transposed else of_a, of_b[::-1] if p.b_transposed else of_b,
            None, result, result, result,
        )  # fmt: skip
    plan = launch_plan(
        _gemm_kernel,
        windows,
        KIND=first,
        ACTIVATION=activation,
        A_TRANSPOSED=p.a_transposed,
        B_TRANSPOSED=p.b_transposed,
        TMA=p.by_copies,
        TMA_RESULTS=p.results_by_copies,
        IS_SPLIT=p.is_split,
        EVEN_K=p.even_k,
        M_UNIT=p.m_unit,
        N_UNIT=p.n_unit,
        K_UNIT=p.k_unit,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        PARTS=tile.parts,
        WARP_SPECIALIZE=is_specialized,
        PRECISION=p.precision,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,  # Horner's rule in activations
        **register_limit(0 if is_specialized else tile.max_registers, p.architecture),
    )
    reduce = None
    if p.is_split:
        reduce = launch_plan(
            _gemm_reduce_kernel,
            KIND=p.kind,
            ACTIVATION=p.activation,
            N_UNIT=p.n_unit,
            BLOCK_M=_REDUCE_M,
            BLOCK_N=_REDUCE_N,
            num_warps=4,
            enable_fp_fusion=True,
            **register_limit(_REDUCE_REGISTERS, p.architecture),
        )
    return _Prepared(plan, tile, resident, is_specialized, reduce)


def launch(a: Tensor, b: Tensor, tile: Tile, epilogue: Epilogue) -> Tensor | None:
    """Runs our kernel on a [M, K] and b [K, N], M, N, K >= 1; returns the partial column sums [P, 1, N], if wanted."""
    (num_rows, num_inner), num_cols = a.shape, b.shape[1]
    (a, a_transposed), (b, b_transposed) = row_major(a), row_major(b)
    device, name = a.device, architecture(a.device)
    x, y, z, bias = epilogue.x, epilogue.y, epilogue.z, epilogue.bias
    by_copies = kind_of(name) in _WITH_COPY_ENGINE and has_aligned_rows(a) and has_aligned_rows(b)
    splits = _num_splits(num_inner, tile)
    is_split = splits > 1
    # Of a split product the kernel writes partial ones, whose rows are as aligned as their number is.
    results = [] if is_split else [t for t in (x, y, z) if t is not None]
    rows_are_aligned = num_cols * 4 % _ALIGNMENT == 0 if is_split else all(map(has_aligned_rows, results))
    vector = _ALIGNMENT // a.dtype.itemsize
    m_unit = math.gcd(num_rows, vector) if a_transposed and not by_copies else 1
    # Where K is the number of tokens, every batch is another one: one kernel, with masks, serves them all.
    k_is_contiguous = (not a_transposed or b_transposed) and not by_copies
    k_unit, n_unit = math.gcd(num_inner, vector) if k_is_contiguous else 1, math.gcd(num_cols, vector)
    ready = _prepare(
        _Form(
            a.dtype, a_transposed, b_transposed, by_copies, by_copies and rows_are_aligned, epilogue.kind,
            epilogue.activation, epilogue.wants_sums, tile, is_split, m_unit, n_unit, k_unit,
            k_is_contiguous and num_inner % tile.block_k == 0, name, _precision(a.dtype, name),
        )
    )  # fmt: skip
    num_m, num_n = ceil_div(num_rows, ready.tile.block_m), ceil_div(num_cols, ready.tile.block_n)
    num_programs = smaller(num_m * num_n * splits, num_multiprocessors(device) * ready.resident)
    numbers = (num_rows // m_unit, num_cols // n_unit, num_inner // k_unit, splits)
    partial = None
    if epilogue.wants_sums:
        row_blocks = ceil_div(num_rows, _REDUCE_M if is_split else ready.tile.block_m)
        partial = a.new_empty((row_blocks, 1, num_cols), dtype=torch.float32)

    def run(bias: Tensor | None, x: Tensor | None, y: Tensor, z: Tensor | None, partial: Tensor | None) -> None:
        strides = a.stride(0), b.stride(0), _row_stride(x), y.stride(0), _row_stride(z)
        ready.plan((num_programs,), (a, b, bias, x, y, z, partial), (*strides, *numbers))

    if ready.reduce is not None:
        split_rows = num_m * ready.tile.block_m
        product = a.new_empty((splits * split_rows, num_cols), dtype=torch.float32)
        run(None, None, product, None, None)
        ready.reduce(
            (ceil_div(num_rows, _REDUCE_M), ceil_div(num_cols, _REDUCE_N)),
            (product, bias, x, y, z, partial),
            (_row_stride(x), y.stride(0), _row_stride(z), num_rows, num_cols // n_unit, splits, split_rows),
        )
    elif ready.needs_workspace:
        _with_workspace(device, lambda: run(bias, x, y, z, partial))
    else:
        run(bias, x, y, z, partial)
    return partial


def _num_splits(num_inner: int, tile: Tile) -> int:
    """Parts of K, none of them without a step."""
    if tile.split_k == 1:
        return 1
    steps = ceil_div(num_inner, tile.block_k)
    return ceil_div(steps, ceil_div(steps, tile.split_k))


def _row_stride(t: Tensor | None) -> int:
    return 0 if t is None else t.stride(0)
