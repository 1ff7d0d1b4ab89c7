"""Device side of cross entropy, row by row: the kernels that `cross_entropy.py` launches; the formulas are there.

Long rows: one to a program. Rows of 30,522 bf16 scores are 61,044 bytes: they begin at any multiple of 4 bytes. So a
row is cut at the 16-byte boundaries of memory: whole vectors of 128 bits between the first and the last boundary,
single elements (at most 7 on either side) before and behind. Masks are constant within a vector, so vectors stay whole.
Short rows: several whole rows in a tile [ROWS, COLS].
"""

import math

import torch
import triton
import triton.language as tl

from bert_fast.triton._math import row_major

LOG2_E = tl.constexpr(math.log2(math.e))
# Where the running maximum starts: finite, so that no difference of two maxima is inf - inf. Scores of -inf stay below
# it and add exp(-inf) = 0; a score as low as fp32 goes equals it and counts.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _exp_of(x):
    """exp by the base-2 exponential, which is what the hardware has."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def _loss_and_lse(maximum, total, z_label, distance, n_cols, smoothing, HAS_SMOOTHING: tl.constexpr):
    """loss_row and lse from the maximum, total = sum exp(z - maximum), z_c and distance = sum (z - z_c)."""
    # Differences of scores are exact, where lse of scores near 1e4 is rounded to 1e-3, and so would a mean of them be.
    log_total = tl.log(total)
    loss = (maximum - z_label) + log_total
    if HAS_SMOOTHING:
        loss -= smoothing * (distance / n_cols)
    return loss, maximum + log_total


@triton.jit
def _or_nothing(value, is_labelled, is_class):
    """value where the label is a class; 0 without a label; NaN for a label that is no class, for all to see."""
    return tl.where(is_class, value, tl.where(is_labelled, float("nan"), 0.0))


@triton.jit
def _gradient(x, col, label, lse, scale, smoothing, n_cols):
    """dz of scores x in columns col; smoothing moves the same share to every column."""
    share = smoothing / n_cols
    return (_exp_of(x - lse) - tl.where(col == label, 1.0 - smoothing + share, share)) * scale


@triton.jit
def _edge_columns(lane, head, tail, n_cols, VECTOR: tl.constexpr):
    """(column, whether there is one) for every lane; head and tail are below VECTOR.

    The first `head` lanes take the elements before the vectors of a row, lanes from VECTOR on the `tail` behind them.
    """
    is_behind = lane >= VECTOR
    col = tl.where(is_behind, n_cols - tail + lane - VECTOR, lane)
    return col, (lane < head) | (is_behind & (lane < VECTOR + tail))


@triton.jit(do_not_specialize=["logits_row_stride", "lead", "n_cols", "ignore_index"])
def _cross_entropy_fwd_kernel(
    logits_ptr,
    labels_ptr,
    losses_ptr,
    lse_ptr,
    logits_row_stride,
    lead,
    n_cols,
    ignore_index,
    smoothing,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
):
    """One row per program, CHUNKS * LANES vectors of it at a time; lead: elements from a 16-byte boundary to logits."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row).to(tl.int64)
    is_labelled = label != ignore_index
    is_class = is_labelled & (label >= 0) & (label < n_cols)
    row_ptr = logits_ptr + row * logits_row_stride
    z_label = tl.load(row_ptr + label, mask=is_class, other=0.0).to(tl.float32)

    start = row * logits_row_stride + lead  # of the row, in elements from the boundary
    first_vector = (start + (VECTOR - 1)) // VECTOR
    n_vectors = ((start + n_cols) // VECTOR - first_vector).to(tl.int32)
    # Every lane has its own running maximum and sum: nothing is exchanged before the last vector. The elements at the
    # edges of the row are where lanes start from.
    if HAS_EDGES:
        head = (first_vector * VECTOR - start).to(tl.int32)
        tail = n_cols - head - n_vectors * VECTOR
        lane = tl.arange(0, LANES)
        col, edge_mask = _edge_columns(lane, head, tail, n_cols, VECTOR)
        edge_mask = edge_mask & (lane < tl.where(is_class, LANES, 0))
        edge = tl.load(row_ptr + col, mask=edge_mask, other=float("-inf")).to(tl.float32)
        maximum = tl.maximum(edge, LOWEST)
        total = _exp_of(edge - maximum)
        distance = tl.where(edge_mask, edge - z_label, 0.0)
    else:
        maximum = tl.full([LANES], LOWEST, tl.float32)
        total = tl.zeros([LANES], tl.float32)
        distance = tl.zeros([LANES], tl.float32)

    vectors_ptr = tl.multiple_of(logits_ptr - lead, 16) + first_vector * VECTOR
    lane_vector = tl.arange(0, CHUNKS)[:, None, None] * LANES + tl.arange(0, LANES)[None, :, None]
    element = tl.arange(0, VECTOR)[None, None, :]
    n_read = tl.where(is_class, n_vectors, 0)
    for first in tl.range(0, n_read, CHUNKS * LANES):
        vector = first + lane_vector  # [CHUNKS, LANES, 1]
        mask = vector < n_read
        x = tl.load(row_major(vectors_ptr, vector * VECTOR + element, VECTOR), mask=mask, other=float("-inf")).to(
            tl.float32
        )
        higher = tl.maximum(maximum, tl.max(tl.max(x, 2), 0))
        exps = _exp_of(x - higher[None, :, None])
        total = total * _exp_of(maximum - higher) + tl.sum(tl.sum(exps, 2), 0)
        maximum = higher
        if HAS_SMOOTHING:
            distance += tl.sum(tl.sum(tl.where(mask, x - z_label, 0.0), 2), 0)

    row_maximum = tl.max(maximum, 0)
    row_total = tl.sum(total * _exp_of(maximum - row_maximum), 0)
    row_distance = tl.sum(distance, 0) if HAS_SMOOTHING else 0.0
    loss, lse = _loss_and_lse(row_maximum, row_total, z_label, row_distance, n_cols, smoothing, HAS_SMOOTHING)
    tl.store(losses_ptr + row, _or_nothing(loss, is_labelled, is_class))
    tl.store(lse_ptr + row, _or_nothing(lse, is_labelled, is_class))


@triton.jit(do_not_specialize=["logits_row_stride", "n_rows", "n_cols", "ignore_index"])
def _cross_entropy_fwd_short_kernel(
    logits_ptr,
    labels_ptr,
    losses_ptr,
    lse_ptr,
    logits_row_stride,
    n_rows,
    n_cols,
    ignore_index,
    smoothing,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
):
    """ROWS whole rows of up to COLS classes per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    label = tl.load(labels_ptr + row, mask=row < n_rows, other=ignore_index).to(tl.int64)
    is_labelled = label != ignore_index
    is_class = is_labelled & (label >= 0) & (label < n_cols)
    col = tl.arange(0, COLS)[None, :]
    mask = is_class[:, None] & (col < n_cols)
    # [ROWS, COLS]
    x = tl.load(logits_ptr + row[:, None] * logits_row_stride + col, mask=mask, other=float("-inf")).to(tl.float32)
    maximum = tl.maximum(tl.max(x, 1), LOWEST)
    total = tl.sum(_exp_of(x - maximum[:, None]), 1)
    z_label = tl.sum(tl.where(col == label[:, None], x, 0.0), 1)
    distance = tl.sum(tl.where(mask, x - z_label[:, None], 0.0), 1)
    loss, lse = _loss_and_lse(maximum, total, z_label, distance, n_cols, smoothing, HAS_SMOOTHING)
    tl.store(losses_ptr + row, _or_nothing(loss, is_labelled, is_class), mask=row < n_rows)
    tl.store(lse_ptr + row, _or_nothing(lse, is_labelled, is_class), mask=row < n_rows)


@triton.jit(
    do_not_specialize=[
        "logits_row_stride", "dlogits_row_stride", "logits_lead", "dlogits_lead", "n_rows", "n_cols", "ignore_index",
    ]
)  # fmt: skip
def _cross_entropy_bwd_kernel(
    scale_ptr,
    logits_ptr,
    labels_ptr,
    lse_ptr,
    dlogits_ptr,
    logits_row_stride,
    dlogits_row_stride,
    logits_lead,
    dlogits_lead,
    n_rows,
    n_cols,
    ignore_index,
    smoothing,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    LOAD_VECTOR: tl.constexpr,
    HAS_EDGES: tl.constexpr,
):
    """One row per program; vectors are those of dlogits, which logits share where LOAD_VECTOR is VECTOR.

    dlogits may be logits: every element is read by the thread that overwrites it.
    """
    # Last row first: what forward read last may still be in the cache, and what a matrix product reads first then is.
    row = n_rows - 1 - tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row).to(tl.int64)
    is_labelled = label != ignore_index
    # Without a label: exp(0 - 0) * 0, whatever the scores are. A label that is no class left lse = NaN behind.
    lse = tl.load(lse_ptr + row, mask=is_labelled, other=0.0)
    scale = tl.load(scale_ptr, mask=is_labelled, other=0.0)
    label = label.to(tl.int32)

    start = row * dlogits_row_stride + dlogits_lead
    first_vector = (start + (VECTOR - 1)) // VECTOR
    n_vectors = ((start + n_cols) // VECTOR - first_vector).to(tl.int32)
    head = (first_vector * VECTOR - start).to(tl.int32)
    if HAS_EDGES:
        tail = n_cols - head - n_vectors * VECTOR
        lane = tl.arange(0, LANES)
        col, edge_mask = _edge_columns(lane, head, tail, n_cols, VECTOR)
        edge_read = edge_mask & (lane < tl.where(is_labelled, LANES, 0))
        edge = tl.load(logits_ptr + row * logits_row_stride + col, mask=edge_read, other=0.0).to(tl.float32)
        edge_dz = _gradient(edge, col, label, lse, scale, smoothing, n_cols).to(dlogits_ptr.dtype.element_ty)
        tl.store(dlogits_ptr + row * dlogits_row_stride + col, edge_dz, mask=edge_mask)

    # The scores of the first vector of dlogits, counted in units that the launcher knows to fit.
    first_load = (row * logits_row_stride + logits_lead + head) // LOAD_VECTOR
    loads_ptr = tl.multiple_of(logits_ptr - logits_lead, 16) + first_load * LOAD_VECTOR
    stores_ptr = tl.multiple_of(dlogits_ptr - dlogits_lead, 16) + first_vector * VECTOR
    lane_vector = tl.arange(0, CHUNKS)[:, None, None] * LANES + tl.arange(0, LANES)[None, :, None]
    element = tl.arange(0, VECTOR)[None, None, :]
    n_read = tl.where(is_labelled, n_vectors, 0)
    for first in tl.range(0, n_vectors, CHUNKS * LANES):
        vector = first + lane_vector  # [CHUNKS, LANES, 1]
        offset = vector * VECTOR + element
        x = tl.load(row_major(loads_ptr, offset, LOAD_VECTOR), mask=vector < n_read, other=0.0).to(tl.float32)
        dz = _gradient(x, head + offset, label, lse, scale, smoothing, n_cols)
        tl.store(row_major(stores_ptr, offset, VECTOR), dz.to(dlogits_ptr.dtype.element_ty), mask=vector < n_vectors)


@triton.jit(do_not_specialize=["logits_row_stride", "dlogits_row_stride", "n_rows", "n_cols", "ignore_index"])
def _cross_entropy_bwd_short_kernel(
    scale_ptr,
    logits_ptr,
    labels_ptr,
    lse_ptr,
    dlogits_ptr,
    logits_row_stride,
    dlogits_row_stride,
    n_rows,
    n_cols,
    ignore_index,
    smoothing,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """ROWS whole rows of up to COLS classes per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.arange(0, COLS)[None, :]
    mask = (row < n_rows) & (col < n_cols)
    label = tl.load(labels_ptr + row, mask=row < n_rows, other=ignore_index).to(tl.int64)
    is_labelled = label != ignore_index
    lse = tl.load(lse_ptr + row, mask=is_labelled, other=0.0)
    scale = tl.where(is_labelled, tl.load(scale_ptr), 0.0)
    x = tl.load(logits_ptr + row * logits_row_stride + col, mask=mask & is_labelled, other=0.0).to(tl.float32)
    dz = _gradient(x, col, label, lse, scale, smoothing, n_cols)
    tl.store(dlogits_ptr + row * dlogits_row_stride + col, dz.to(dlogits_ptr.dtype.element_ty), mask=mask)
