"""Sums over rows: the second stage, of the partial sums that the programs of a backward kernel wrote, and whole ones.

Two stages without atomics: the order of additions depends on the number of programs alone, so results repeat bit for
bit, and sums of several kernels can share a launch (`launched_together`): to each it is as if it were alone. Bytes
moved: 4 K H per program read, K H e written.

Rows that no kernel of ours has in registers are summed in one stage, in the same launch (`row_sums`): a program reads
all rows of a few columns. Bytes moved: e T N read, N e written.
"""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.triton._launch import ceil_div, unit_stride
from bert_fast.triton._launch_plan import LaunchPlan

# 32 columns are 128 bytes of every row of partial sums; 256 rows at once, since latency is all that is waited for.
_PARTIALS, _COLS, _WARPS = 256, 32, 8
_TENSORS, _SUMS = 3, 3  # tensors of partial sums that a launch takes, and sums of each: what a layer has
_NONE = (None,) * _SUMS
# Of rows: 16 columns of half precision are a sector of memory (32 bytes), and make enough programs of the 3 H columns
# of q, k and v: 144 at H = 768. With 256 rows a thread has 32 bytes to come, in fp32 64.
_ROWS, _ROW_COLS = 256, 16

_Sums = tuple[Tensor, tuple[Tensor, ...]]  # partial sums, and where their sums go


@triton.jit
def _sum_of_block(
    block, which, partial_ptr, sum0_ptr, sum1_ptr, sum2_ptr, n_partials,
    N_SUMS: tl.constexpr, N_COLS: tl.constexpr, BLOCK_PARTIALS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Sums partial (fp32 [n_partials, N_SUMS, N_COLS]) over its first dimension: a block of one sum's columns."""
    offs_n = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask_n = offs_n < N_COLS
    acc = tl.zeros([BLOCK_PARTIALS, BLOCK_COLS], tl.float32)
    for start in tl.range(0, n_partials, BLOCK_PARTIALS):
        partial = start + tl.arange(0, BLOCK_PARTIALS)[:, None]
        offset = (partial.to(tl.int64) * N_SUMS + which) * N_COLS + offs_n[None, :]
        acc += tl.load(partial_ptr + offset, mask=(partial < n_partials) & mask_n[None, :], other=0.0)
    total = tl.sum(acc, 0)
    if N_SUMS == 1 or which == 0:
        tl.store(sum0_ptr + offs_n, total.to(sum0_ptr.dtype.element_ty), mask=mask_n)
    elif N_SUMS == 2 or which == 1:
        tl.store(sum1_ptr + offs_n, total.to(sum1_ptr.dtype.element_ty), mask=mask_n)
    else:
        tl.store(sum2_ptr + offs_n, total.to(sum2_ptr.dtype.element_ty), mask=mask_n)


@triton.jit(do_not_specialize=["n_partials"])
def _column_sums_kernel(
    partial_ptr, sum0_ptr, sum1_ptr, sum2_ptr, n_partials,
    N_SUMS: tl.constexpr, N_COLS: tl.constexpr, BLOCK_PARTIALS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): block i of sum j."""
    _sum_of_block(
        tl.program_id(0), tl.program_id(1), partial_ptr, sum0_ptr, sum1_ptr, sum2_ptr, n_partials,
        N_SUMS, N_COLS, BLOCK_PARTIALS, BLOCK_COLS,
    )  # fmt: skip


@triton.jit
def _sum_of_rows(
    block, rows_ptr, sum_ptr, row_stride, n_rows,
    N_COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, STRIDE_UNIT: tl.constexpr,
):  # fmt: skip
    """Sums rows [n_rows, N_COLS] over its first dimension: a block of columns, in fp32, rounded once."""
    col = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask_col = col < N_COLS
    acc = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    # Four rounds' loads in flight: a multiprocessor that has one such program would wait for memory otherwise.
    rounds: tl.constexpr = 1 if rows_ptr.dtype.element_ty == tl.float32 else 4
    for start in tl.range(0, n_rows, BLOCK_ROWS, loop_unroll_factor=rounds):
        row = (start + tl.arange(0, BLOCK_ROWS))[:, None].to(tl.int64)  # offsets pass 2^31
        offset = row * row_stride * STRIDE_UNIT + col[None, :]
        acc += tl.load(rows_ptr + offset, mask=(row < n_rows) & mask_col[None, :], other=0.0).to(tl.float32)
    tl.store(sum_ptr + col, tl.sum(acc, 0).to(sum_ptr.dtype.element_ty), mask=mask_col)


@triton.jit
def _sum_of_place(
    place, partial0_ptr, partial1_ptr, partial2_ptr, sum00_ptr, sum01_ptr, sum02_ptr, sum10_ptr, sum11_ptr, sum12_ptr,
    sum20_ptr, sum21_ptr, sum22_ptr, n_partials0, n_partials1, n_partials2,
    N_SUMS0: tl.constexpr, N_COLS0: tl.constexpr, N_SUMS1: tl.constexpr, N_COLS1: tl.constexpr,
    N_SUMS2: tl.constexpr, N_COLS2: tl.constexpr, BLOCK_PARTIALS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The block at this place of all blocks of all sums of two or three tensors (the third may be None)."""
    blocks0: tl.constexpr = (N_COLS0 + BLOCK_COLS - 1) // BLOCK_COLS
    blocks1: tl.constexpr = (N_COLS1 + BLOCK_COLS - 1) // BLOCK_COLS
    blocks2: tl.constexpr = (N_COLS2 + BLOCK_COLS - 1) // BLOCK_COLS
    first1: tl.constexpr = N_SUMS0 * blocks0
    first2: tl.constexpr = first1 + N_SUMS1 * blocks1
    if place < first1:
        _sum_of_block(
            place % blocks0, place // blocks0, partial0_ptr, sum00_ptr, sum01_ptr, sum02_ptr, n_partials0,
            N_SUMS0, N_COLS0, BLOCK_PARTIALS, BLOCK_COLS,
        )  # fmt: skip
    elif partial2_ptr is None or place < first2:
        place -= first1
        _sum_of_block(
            place % blocks1, place // blocks1, partial1_ptr, sum10_ptr, sum11_ptr, sum12_ptr, n_partials1,
            N_SUMS1, N_COLS1, BLOCK_PARTIALS, BLOCK_COLS,
        )  # fmt: skip
    else:
        place -= first2
        _sum_of_block(
            place % blocks2, place // blocks2, partial2_ptr, sum20_ptr, sum21_ptr, sum22_ptr, n_partials2,
            N_SUMS2, N_COLS2, BLOCK_PARTIALS, BLOCK_COLS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_partials0", "n_partials1", "n_partials2", "row_stride", "n_rows"])
def _column_sums_together_kernel(
    partial0_ptr, partial1_ptr, partial2_ptr, sum00_ptr, sum01_ptr, sum02_ptr, sum10_ptr, sum11_ptr, sum12_ptr,
    sum20_ptr, sum21_ptr, sum22_ptr, rows_ptr, sum_of_rows_ptr, n_partials0, n_partials1, n_partials2, row_stride,
    n_rows, N_SUMS0: tl.constexpr, N_COLS0: tl.constexpr, N_SUMS1: tl.constexpr, N_COLS1: tl.constexpr,
    N_SUMS2: tl.constexpr, N_COLS2: tl.constexpr, N_COLS_OF_ROWS: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_ROW_COLS: tl.constexpr,
):  # fmt: skip
    """A block of columns per program: of rows, which have the most to read, then of the sums of partial sums.

    Either may be None: rows, or all partial sums.
    """
    row_blocks: tl.constexpr = (N_COLS_OF_ROWS + BLOCK_ROW_COLS - 1) // BLOCK_ROW_COLS
    place = tl.program_id(0)
    if rows_ptr is not None and (partial0_ptr is None or place < row_blocks):
        _sum_of_rows(
            place, rows_ptr, sum_of_rows_ptr, row_stride, n_rows, N_COLS_OF_ROWS, BLOCK_ROWS, BLOCK_ROW_COLS,
            STRIDE_UNIT,
        )  # fmt: skip
    elif partial0_ptr is not None:
        _sum_of_place(
            place - row_blocks, partial0_ptr, partial1_ptr, partial2_ptr, sum00_ptr, sum01_ptr, sum02_ptr, sum10_ptr,
            sum11_ptr, sum12_ptr, sum20_ptr, sum21_ptr, sum22_ptr, n_partials0, n_partials1, n_partials2,
            N_SUMS0, N_COLS0, N_SUMS1, N_COLS1, N_SUMS2, N_COLS2, BLOCK_PARTIALS, BLOCK_COLS,
        )  # fmt: skip


class _Waiting(NamedTuple):
    """What a context is to launch."""

    partial: list[_Sums]
    rows: list[tuple[Tensor, Tensor]]  # a matrix, and where the sum of its rows goes


_waiting: ContextVar[_Waiting | None] = ContextVar("waiting", default=None)


@contextmanager
def launched_together() -> Iterator[None]:
    """Within the context sums are only noted; where it ends, three of partial sums and one of rows share a launch.

    Until then nobody may read the sums. All are of one device. Where an error leaves the context nothing is launched. A
    context within another launches what is its own; each thread has its own.
    """
    waiting = _Waiting([], [])
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)
    partial, rows = waiting
    for start in range(0, len(partial), _TENSORS):
        several = partial[start : start + _TENSORS]
        _launch_together(several, rows.pop() if rows and len(several) > 1 else None)
    for one in rows:
        _launch_together([], one)


def column_sums(partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """partial (fp32 [P, K, H], contiguous, P >= 1, K 1 to 3) summed over P: K new tensors [H] of the given dtype."""
    num_partials, num_sums, num_cols = partial.shape
    first = partial.new_empty(num_cols, dtype=dtype)
    sums = (first, *[torch.empty_like(first) for _ in range(num_sums - 1)])
    waiting = _waiting.get()
    if waiting is None:
        plan, grid = _plan(num_sums, num_cols)
        plan(grid, (partial, *sums, *_NONE[num_sums:]), (num_partials,))
    else:
        waiting.partial.append((partial, sums))
    return sums


def row_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """rows ([T, N], fp32, fp16 or bf16) summed over T in fp32, in a fixed order: a new tensor [N] of this dtype."""
    rows = unit_stride(rows)
    made = rows.new_empty(rows.shape[1], dtype=dtype)
    if not rows.shape[0]:
        return made.zero_()
    waiting = _waiting.get()
    if waiting is None:
        _launch_together([], (rows, made))
    else:
        waiting.rows.append((rows, made))
    return made


def _launch_together(several: list[_Sums], of_rows: tuple[Tensor, Tensor] | None = None) -> None:
    """Several, up to three, and the sum of rows with none, two or three."""
    shapes = [partial.shape for partial, _ in several]
    outputs: list[Tensor | None] = []
    for _, sums in several:
        outputs += (*sums, *_NONE[len(sums) :])
    if len(several) == 1:
        assert of_rows is None
        plan, grid = _plan(*shapes[0][1:])
        plan(grid, (several[0][0], *outputs), (shapes[0][0],))
        return
    rows, row_stride, stride_unit = None, 0, 1
    if of_rows is not None:
        rows, row_stride = of_rows[0], of_rows[0].stride(0)
        stride_unit = math.gcd(_ROW_COLS, row_stride)
    num_cols = 0 if rows is None else rows.shape[1]
    plan, grid = _plan_together(tuple([shape[1:] for shape in shapes]), num_cols, stride_unit)
    missing = _TENSORS - len(several)
    plan(
        grid,
        (
            *[partial for partial, _ in several], *_NONE[:missing], *outputs, *_NONE * missing,
            *(of_rows or (None, None)),
        ),
        (
            *[shape[0] for shape in shapes], *[0] * missing, row_stride // stride_unit,
            0 if rows is None else rows.shape[0],
        ),
    )  # fmt: skip


_COMMON: dict[str, Any] = dict(BLOCK_PARTIALS=_PARTIALS, BLOCK_COLS=_COLS, num_warps=_WARPS, enable_fp_fusion=True)


@functools.lru_cache(maxsize=1024)
def _plan(num_sums: int, num_cols: int) -> tuple[LaunchPlan, tuple[int, ...]]:
    plan = LaunchPlan(_column_sums_kernel, N_SUMS=num_sums, N_COLS=num_cols, **_COMMON)
    return plan, (ceil_div(num_cols, _COLS), num_sums)


@functools.lru_cache(maxsize=1024)
def _plan_together(
    shapes: tuple[tuple[int, int], ...], cols_of_rows: int, stride_unit: int
) -> tuple[LaunchPlan, tuple[int, ...]]:
    """For up to three tensors of these numbers of sums and columns, and rows of so many columns."""
    sizes = {"N_COLS_OF_ROWS": cols_of_rows, "STRIDE_UNIT": stride_unit}
    for i, (num_sums, num_cols) in enumerate((*shapes, *[(0, 0)] * _TENSORS)[:_TENSORS]):
        sizes |= {f"N_SUMS{i}": num_sums, f"N_COLS{i}": num_cols}
    num_programs = sum(num_sums * ceil_div(num_cols, _COLS) for num_sums, num_cols in shapes)
    num_programs += ceil_div(cols_of_rows, _ROW_COLS)
    of_rows = {"BLOCK_ROWS": _ROWS, "BLOCK_ROW_COLS": _ROW_COLS}
    return LaunchPlan(_column_sums_together_kernel, **sizes, **of_rows, **_COMMON), (num_programs,)
