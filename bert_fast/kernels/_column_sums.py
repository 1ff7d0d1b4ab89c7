"""The second stage of sums over rows: adds up the partial sums that the programs of a backward kernel wrote.

Two stages without atomics: the order of additions depends on the number of programs alone, so results repeat bit for
bit. Bytes moved: 4 K H per program read, K H e written.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.kernels._launch import ceil_div
from bert_fast.kernels._launch_plan import LaunchPlan

__all__ = ["column_sums"]

# 32 columns are 128 bytes of every row of partial sums; 256 rows at once, since latency is all that is waited for.
_PARTIALS, _COLS, _WARPS = 256, 32, 8


@triton.jit(do_not_specialize=["n_partials"])
def _column_sums_kernel(
    partial_ptr,
    sum0_ptr,
    sum1_ptr,
    sum2_ptr,
    n_partials,
    N_SUMS: tl.constexpr,
    N_COLS: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Sums partial (fp32 [n_partials, N_SUMS, N_COLS]) over its first dimension; program (i, j): block i of sum j."""
    offs_n = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask_n = offs_n < N_COLS
    which = tl.program_id(1)
    acc = tl.zeros([BLOCK_PARTIALS, BLOCK_COLS], tl.float32)
    for start in tl.range(0, n_partials, BLOCK_PARTIALS):
        partial = start + tl.arange(0, BLOCK_PARTIALS)[:, None]
        offset = (partial.to(tl.int64) * N_SUMS + which) * N_COLS + offs_n[None, :]
        acc += tl.load(partial_ptr + offset, mask=(partial < n_partials) & mask_n[None, :], other=0.0)
    total = tl.sum(acc, 0)
    if which == 0:
        tl.store(sum0_ptr + offs_n, total.to(sum0_ptr.dtype.element_ty), mask=mask_n)
    elif which == 1:
        tl.store(sum1_ptr + offs_n, total.to(sum1_ptr.dtype.element_ty), mask=mask_n)
    else:
        tl.store(sum2_ptr + offs_n, total.to(sum2_ptr.dtype.element_ty), mask=mask_n)


def column_sums(partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """partial (fp32 [P, K, H], contiguous, P >= 1, K 1 to 3) summed over P: K new tensors [H] of the given dtype."""
    num_partials, num_sums, num_cols = partial.shape
    first = torch.empty(num_cols, dtype=dtype, device=partial.device)
    sums = (first, *[torch.empty_like(first) for _ in range(num_sums - 1)])
    pointers = (*sums, *sums[:1] * (3 - num_sums))  # those past K are never stored to
    _plan(num_sums, num_cols)((ceil_div(num_cols, _COLS), num_sums), (partial, *pointers), (num_partials,))
    return sums


@functools.lru_cache(maxsize=1024)
def _plan(num_sums: int, num_cols: int) -> LaunchPlan:
    return LaunchPlan(
        _column_sums_kernel, N_SUMS=num_sums, N_COLS=num_cols, BLOCK_PARTIALS=_PARTIALS, BLOCK_COLS=_COLS,
        num_warps=_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
