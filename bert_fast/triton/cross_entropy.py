"""Mean cross entropy of class scores in Triton, forward and backward: one read of the scores each, no fp32 copy.

For a row z of C scores with label c, smoothing s, m = max(z), and lse = m + log sum exp(z - m):
    loss_row = (1 - s) * (lse - z_c) + s * (lse - mean(z)) = (m - z_c) + log sum exp(z - m) - s * mean(z - z_c)
    loss     = sum of loss_row over labelled rows / number of labelled rows            0 where no row is labelled
    dz       = dloss / number * (exp(z - lse) - (1 - s) * onehot(c) - s / C)           0 in rows without a label
A running maximum makes forward a single pass: with m' = max(m, x), sum' = sum * exp(m - m') + exp(x - m').

Source: Milakov and Gimelshein 2018 (arXiv:1805.02867), algorithm 3, for the running maximum; Szegedy et al. 2016
(arXiv:1512.00567), section 7, for smoothing; derivation in docs/kernels/cross_entropy.md.

Shapes: logits, dlogits [N, C]; labels, losses, lse [N]; loss, dloss, scale [].
Bytes moved, with elements of e bytes and labels of b bytes (the floor, and what the kernels do):
    forward   per labelled row: reads C e + b, and z_c once more (e); writes 8 (loss, lse); without a label b and 8
              once: reads N (4 + b), writes 4                                                       (mean of the losses)
    backward  per labelled row: reads C e + b + 4 + 4 (lse, scale), writes C e; without a label reads b, writes C e
              once: reads N b + 4, writes 4                                                          (dloss / number)
Saved: logits, labels, lse. Recomputed: the number of labelled rows, from labels, so that it never leaves the device.
Precision: scores are widened to fp32 at once; maximum, sums and all arithmetic are fp32; dlogits rounds once.
Determinism: no atomics; every sum is taken in an order that depends on N and C alone.

Rows are treated one by one (`cross_entropy_rows_fwd`, `cross_entropy_rows_bwd`); what concerns all of them, the mean
and its derivative, is a second launch. So a caller that makes logits chunk by chunk can call the first per chunk.
Kernels of rows, and how unaligned rows become aligned vectors: `_cross_entropy_rows.py`.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.reference.cross_entropy import CrossEntropy
from bert_fast.triton._cross_entropy_rows import (
    _cross_entropy_bwd_kernel,
    _cross_entropy_bwd_short_kernel,
    _cross_entropy_fwd_kernel,
    _cross_entropy_fwd_short_kernel,
)
from bert_fast.triton._launch import ceil_div, unit_stride
from bert_fast.triton._launch_plan import launch_plan


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def _cross_entropy_mean_kernel(
    numerator_ptr, labels_ptr, quotient_ptr, n_rows, ignore_index, IS_SUM: tl.constexpr, BLOCK: tl.constexpr
):
    """quotient = (sum of numerator [n_rows], or with IS_SUM False numerator []) / number of labelled rows; one program.

    A quotient over no rows is 0 / 1 in forward, and nothing is multiplied by it in backward.
    """
    offs = tl.arange(0, BLOCK)
    numerators = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, n_rows, BLOCK):
        mask = first + offs < n_rows
        label = tl.load(labels_ptr + first + offs, mask=mask, other=ignore_index)
        counts += (label != ignore_index).to(tl.int32)
        if IS_SUM:
            numerators += tl.load(numerator_ptr + first + offs, mask=mask, other=0.0)
    numerator = tl.sum(numerators, 0) if IS_SUM else tl.load(numerator_ptr)
    tl.store(quotient_ptr, numerator / tl.maximum(tl.sum(counts, 0), 1).to(tl.float32))


@dataclass(frozen=True)
class LaunchConfig:
    """How rows of C scores are laid over threads."""

    rows: int  # per program; more than one: whole rows in a tile [rows, cols]
    cols: int  # of a row, treated at a time
    vector: int  # neighbouring scores of one thread, 128 bits
    num_warps: int

    @property
    def is_short(self) -> bool:
        """Whether rows lie in tiles of several."""
        return self.rows > 1


_VECTOR_BYTES = 16  # the widest load and store of a thread
# Of a long row: chunks that a thread has in flight, and lanes per warp. 64 lanes are the threads of a warp on AMD, and
# two vectors of each thread on NVIDIA: 2 and 4 loads of 128 bits in flight per thread, no exchange between threads.
_CHUNKS, _LANES_PER_WARP = 2, 64
_MAX_WARPS = 8
RESIDENT_WARPS = 32  # that the reasoning below counts on a multiprocessor; the ahead-of-time gate checks the registers
# Of short rows: columns of a tile. Few sizes, since each is another kernel, and rows that hold a score for every token
# of a text have any length: those of 33 and more share one. Lanes without a column cost these calls nothing to speak
# of: what they wait for is memory.
_SHORT_COLS = (2, 16, 32, 128)
_SHORT_TILE, _SHORT_WARPS = 1024, 4
_SAME_KERNEL = 512  # columns, as long as BERT's texts are: up to there longer rows share a kernel, too
_MEAN_BLOCK, _MEAN_WARPS = 4096, 16


@functools.cache
def launch_config(num_classes: int, dtype: torch.dtype) -> LaunchConfig:
    """The configuration for rows of `num_classes` scores, any number from 1, of fp32, fp16 or bf16."""
    vector = _VECTOR_BYTES // dtype.itemsize
    if num_classes <= _SHORT_COLS[-1]:  # up to 256 bytes of bf16: less than the threads of one warp load at once
        cols = next(cols for cols in _SHORT_COLS if num_classes <= cols)
        return LaunchConfig(_SHORT_TILE // cols, cols, vector, _SHORT_WARPS)
    # Eight warps have 16 KB in flight. A latency of about 0.7 us at 4.3 TB/s and 132 multiprocessors asks for 23 KB on
    # each: four resident programs (64 registers a thread) have 64 KB, and a row of 61 KB takes 4 steps, the last of
    # them three quarters full. More warps would wait longer for each other at the one reduction of a row; fewer would
    # share a multiprocessor with more rows, all of which end late. Short rows take as many warps as fill a step.
    warp_cols = _CHUNKS * _LANES_PER_WARP * vector
    num_warps = min(_MAX_WARPS, 1 << (ceil_div(num_classes, warp_cols) - 1).bit_length())
    return LaunchConfig(1, num_warps * warp_cols, vector, num_warps)


def _has_edges(num_classes: int, lead: int, row_stride: int, vector: int) -> bool:
    """Whether rows may begin or end within a vector; of rows up to `_SAME_KERNEL`, whose lengths vary, always.

    For these it is one load more, which waits together with the others.
    """
    return num_classes <= _SAME_KERNEL or any(n % vector for n in (lead, row_stride, num_classes))


def _lead(x: Tensor) -> int:
    """Elements between the 16-byte boundary at or below the address of x, and x."""
    return x.data_ptr() % _VECTOR_BYTES // x.element_size()


def cross_entropy_rows_fwd(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """(losses, lse), both fp32 [N], of logits [N, C] and labels [N] (int32 or int64): forward without the mean.

    Both are 0 in rows without a label, whose scores are not read, and NaN where a label is neither a class nor
    ignore_index. Rows may lie anywhere in memory; a copy is made where neighbouring columns are not neighbours.
    """
    logits, labels = unit_stride(logits), labels.contiguous()
    num_rows, num_classes = logits.shape
    losses, lse = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if num_rows == 0:
        return losses, lse
    config = launch_config(num_classes, logits.dtype)
    has_smoothing = label_smoothing > 0.0
    if config.is_short:
        launch_plan(
            _cross_entropy_fwd_short_kernel,
            ROWS=config.rows,
            COLS=config.cols,
            HAS_SMOOTHING=has_smoothing,
            num_warps=config.num_warps,
            enable_fp_fusion=True,  # sums of products at the end of a row
        )(
            (ceil_div(num_rows, config.rows),),
            (logits, labels, losses, lse),
            (logits.stride(0), num_rows, num_classes, ignore_index, label_smoothing),
        )
        return losses, lse
    lead, row_stride = _lead(logits), logits.stride(0)
    launch_plan(
        _cross_entropy_fwd_kernel,
        CHUNKS=_CHUNKS,
        LANES=config.num_warps * _LANES_PER_WARP,
        VECTOR=config.vector,
        HAS_EDGES=_has_edges(num_classes, lead, row_stride, config.vector),
        HAS_SMOOTHING=has_smoothing,
        num_warps=config.num_warps,
        enable_fp_fusion=True,  # total * exp(maximum - higher) + sum
    )((num_rows,), (logits, labels, losses, lse), (row_stride, lead, num_classes, ignore_index, label_smoothing))
    return losses, lse


def cross_entropy_rows_bwd(
    scale: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    dlogits: Tensor,
) -> Tensor:
    """Fills dlogits [N, C] with scale * d(sum of losses) / d(logits) and returns it; scale (fp32 []) is on the device.

    dlogits (dtype of logits): columns are neighbours, rows anywhere apart; logits itself is allowed and is overwritten.
    All accesses are 128 bits wide where rows of both begin equally far from a 16-byte boundary; else stores are, and
    loads as wide as they share.
    """
    logits, labels = unit_stride(logits), labels.contiguous()
    num_rows, num_classes = logits.shape
    if num_rows == 0:
        return dlogits
    config = launch_config(num_classes, logits.dtype)
    strides = logits.stride(0), dlogits.stride(0)
    if config.is_short:
        launch_plan(
            _cross_entropy_bwd_short_kernel,
            ROWS=config.rows,
            COLS=config.cols,
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )(
            (ceil_div(num_rows, config.rows),),
            (scale, logits, labels, lse, dlogits),
            (*strides, num_rows, num_classes, ignore_index, label_smoothing),
        )
        return dlogits
    leads = _lead(logits), _lead(dlogits)
    launch_plan(
        _cross_entropy_bwd_kernel,
        CHUNKS=_CHUNKS,
        LANES=config.num_warps * _LANES_PER_WARP,
        VECTOR=config.vector,
        LOAD_VECTOR=math.gcd(config.vector, leads[0] - leads[1], strides[0] - strides[1]),
        HAS_EDGES=_has_edges(num_classes, leads[1], strides[1], config.vector),
        num_warps=config.num_warps,
        enable_fp_fusion=True,
    )(
        (num_rows,),
        (scale, logits, labels, lse, dlogits),
        (*strides, *leads, num_rows, num_classes, ignore_index, label_smoothing),
    )
    return dlogits


def _divided(numerator: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    quotient = torch.empty((), dtype=torch.float32, device=labels.device)
    launch_plan(
        _cross_entropy_mean_kernel,
        IS_SUM=numerator.dim() == 1,
        BLOCK=_MEAN_BLOCK,
        num_warps=_MEAN_WARPS,
        enable_fp_fusion=True,
    )((1,), (numerator, labels.contiguous(), quotient), (len(labels), ignore_index))
    return quotient


def mean_of_labelled(losses: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Sum of losses (fp32 [N]) / number of rows that carry a label, at least 1: fp32 [], on the device."""
    return _divided(losses, labels, ignore_index)


def divide_by_labelled(dloss: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """dloss (fp32 []) / number of rows that carry a label, at least 1: fp32 [], on the device."""
    return _divided(dloss, labels, ignore_index)


def cross_entropy_fwd(a: CrossEntropy) -> tuple[Tensor, Tensor]:
    """(loss [], lse [N]), as `reference.cross_entropy`, lse 0 in rows without a label."""
    losses, lse = cross_entropy_rows_fwd(*a)
    return mean_of_labelled(losses, a.labels, a.ignore_index), lse


def cross_entropy_bwd(a: CrossEntropy, dloss: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """The gradient of logits, new and contiguous, as `reference.cross_entropy`."""
    dlogits = torch.empty(a.logits.shape, dtype=a.logits.dtype, device=a.logits.device)
    scale = divide_by_labelled(dloss, a.labels, a.ignore_index)
    cross_entropy_rows_bwd(scale, a.logits, a.labels, lse, a.ignore_index, a.label_smoothing, dlogits)
    return {"logits": dlogits}
