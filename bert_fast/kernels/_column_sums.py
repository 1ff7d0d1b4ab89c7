"""The second stage of sums over rows: adds up the partial sums that the programs of a backward kernel wrote.

Two stages without atomics: the order of additions depends on the number of programs alone, so results repeat bit for
bit, and sums of several kernels can share a launch (`launched_together`): to each it is as if it were alone. Bytes
moved: 4 K H per program read, K H e written.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.kernels._launch import ceil_div
from bert_fast.kernels._launch_plan import LaunchPlan

__all__ = ["column_sums", "launched_together"]

# 32 columns are 128 bytes of every row of partial sums; 256 rows at once, since latency is all that is waited for.
_PARTIALS, _COLS, _WARPS = 256, 32, 8
_TENSORS, _SUMS = 3, 3  # tensors of partial sums that a launch takes, and sums of each: what a layer has
_NONE = (None,) * _SUMS

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


@triton.jit(do_not_specialize=["n_partials0", "n_partials1", "n_partials2"])
def _column_sums_together_kernel(
    partial0_ptr, partial1_ptr, partial2_ptr, sum00_ptr, sum01_ptr, sum02_ptr, sum10_ptr, sum11_ptr, sum12_ptr,
    sum20_ptr, sum21_ptr, sum22_ptr, n_partials0, n_partials1, n_partials2,
    N_SUMS0: tl.constexpr, N_COLS0: tl.constexpr, N_SUMS1: tl.constexpr, N_COLS1: tl.constexpr,
    N_SUMS2: tl.constexpr, N_COLS2: tl.constexpr, BLOCK_PARTIALS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The blocks of all sums of two or three tensors (the third may be None) in turn, one per program."""
    place = tl.program_id(0)
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


_waiting: ContextVar[list[_Sums] | None] = ContextVar("waiting", default=None)


@contextmanager
def launched_together() -> Iterator[None]:
    """Within the context `column_sums` only takes note; where it ends, three tensors of partial sums share a launch.

    Until then nobody may read the sums. All are of one device. Where an error leaves the context nothing is launched. A
    context within another launches what is its own; each thread has its own.
    """
    waiting: list[_Sums] = []
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)
    for start in range(0, len(waiting), _TENSORS):
        _launch_together(waiting[start : start + _TENSORS])


def column_sums(partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """partial (fp32 [P, K, H], contiguous, P >= 1, K 1 to 3) summed over P: K new tensors [H] of the given dtype."""
    num_partials, num_sums, num_cols = partial.shape
    first = torch.empty(num_cols, dtype=dtype, device=partial.device)
    sums = (first, *[torch.empty_like(first) for _ in range(num_sums - 1)])
    waiting = _waiting.get()
    if waiting is None:
        plan, grid = _plan(num_sums, num_cols)
        plan(grid, (partial, *sums, *_NONE[num_sums:]), (num_partials,))
    else:
        waiting.append((partial, sums))
    return sums


def _launch_together(several: list[_Sums]) -> None:
    shapes = [partial.shape for partial, _ in several]
    outputs: list[Tensor | None] = []
    for _, sums in several:
        outputs += (*sums, *_NONE[len(sums) :])
    if len(several) == 1:
        plan, grid = _plan(*shapes[0][1:])
        plan(grid, (several[0][0], *outputs), (shapes[0][0],))
        return
    plan, grid = _plan_together(tuple([shape[1:] for shape in shapes]))
    missing = _TENSORS - len(several)
    plan(
        grid,
        (*[partial for partial, _ in several], *_NONE[:missing], *outputs, *_NONE * missing),
        (*[shape[0] for shape in shapes], *[0] * missing),
    )


_COMMON: dict[str, Any] = dict(BLOCK_PARTIALS=_PARTIALS, BLOCK_COLS=_COLS, num_warps=_WARPS, enable_fp_fusion=True)


@functools.lru_cache(maxsize=1024)
def _plan(num_sums: int, num_cols: int) -> tuple[LaunchPlan, tuple[int, ...]]:
    plan = LaunchPlan(_column_sums_kernel, N_SUMS=num_sums, N_COLS=num_cols, **_COMMON)
    return plan, (ceil_div(num_cols, _COLS), num_sums)


@functools.lru_cache(maxsize=1024)
def _plan_together(shapes: tuple[tuple[int, int], ...]) -> tuple[LaunchPlan, tuple[int, ...]]:
    """For two or three tensors of these numbers of sums and columns."""
    sizes = {}
    for i, (num_sums, num_cols) in enumerate((*shapes, (0, 0))[:_TENSORS]):
        sizes |= {f"N_SUMS{i}": num_sums, f"N_COLS{i}": num_cols}
    num_programs = sum(num_sums * ceil_div(num_cols, _COLS) for num_sums, num_cols in shapes)
    return LaunchPlan(_column_sums_together_kernel, **sizes, **_COMMON), (num_programs,)
