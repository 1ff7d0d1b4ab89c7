"""LayerNorm of a tile of whole rows, shared by every kernel that normalises: arithmetic, and how statistics are stored.

Tiles are [CHUNKS, ROWS, CHUNK_COLS] as `_launch.py:RowTile` lays them out: sums run first inside a thread (over
chunks), then over the threads of the row.
"""

import triton
import triton.language as tl

from bert_fast.triton._math import add_pairs


@triton.jit
def mean_of_rows(h, N_COLS: tl.constexpr):
    """[1, ROWS, 1]: the means of rows h, which are 0 behind the last column."""
    return tl.sum(tl.sum(h, 0, keep_dims=True), 2, keep_dims=True) / N_COLS


@triton.jit
def normalise(h, mask_col, eps, N_COLS: tl.constexpr):
    """(h - mean, mean, rstd) of fp32 rows h; mean and rstd are [1, ROWS, 1].

    h must be 0 outside mask_col (bool [CHUNKS, 1, CHUNK_COLS]); so is h - mean there.
    """
    # Two passes over registers: E[h^2] - E[h]^2 would cancel where the mean is large.
    mean = mean_of_rows(h, N_COLS)
    centred = tl.where(mask_col, h - mean, 0.0)
    variance = tl.sum(tl.sum(centred * centred, 0, keep_dims=True), 2, keep_dims=True) / N_COLS
    return centred, mean, tl.rsqrt(variance + eps)


@triton.jit
def layer_norm_backward(g, n, rstd, N_COLS: tl.constexpr):
    """dh = rstd * (g - mean(g) - n * mean(g * n)) of fp32 rows g = dy * weight and n = (h - mean) * rstd.

    g must be 0 in masked columns; what n holds there enters no sum.
    """
    # First inside each thread, then both sums in one exchange between threads.
    sum_g, sum_gn = tl.sum(g, 0, keep_dims=True), tl.sum(g * n, 0, keep_dims=True)
    sum_g, sum_gn = tl.reduce((sum_g, sum_gn), 2, add_pairs, keep_dims=True)  # [1, ROWS, 1] each
    return rstd * (g - sum_g / N_COLS - n * (sum_gn / N_COLS))


@triton.jit
def store_of_rows(ptr, row, value, mask_row, THREADS: tl.constexpr):
    """ptr[row] = value, both [1, ROWS, 1]; THREADS: of a row, CHUNK_COLS / VECTOR.

    The first thread of a row stores what it holds. A tile [1, ROWS, 1] would be laid over other threads, and its values
    go there through shared memory, at two barriers for each tensor. The other threads' addresses are masked: they run
    along the row so that Triton lays it over neighbouring threads.
    """
    thread = tl.arange(0, THREADS)[None, None, :]
    tl.store(ptr + row + thread, value + tl.zeros_like(thread).to(value.dtype), mask=mask_row & (thread == 0))
