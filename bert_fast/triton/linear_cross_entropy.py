"""Mean cross entropy of x W^T + b in Triton, with its gradients, chunk by chunk: no logits outlive their chunk.

For a chunk of n rows, with V' = V rounded up to a multiple of 64 and p = softmax(z):
    Z  = x W^T + b            [n, V] in rows of V' elements, so that all begin at a 128-byte boundary  (_gemm.product);
                              what lies behind their V columns counts for nothing
    losses [n], dZ over Z     (m - z_c) + log sum exp(z - m) - s mean(z - z_c);  p - (1 - s) onehot(c) - s / V
    dx = dZ W                 fp32 [n, H]                                                              (_gemm.product)
    dweight += dZ^T x         fp32 [V, H]                                                              (_gemm.product)
    dbias   += column sums of dZ, fp32 [V]
    loss = sum of losses / number of labelled rows; backward scales dx, dweight and dbias by dloss / number

Source: Milakov and Gimelshein 2018 (arXiv:1805.02867), algorithm 3, for the running maximum; Szegedy et al. 2016
(arXiv:1512.00567), section 7, for smoothing; that one forward can make both loss and gradients is the idea of Hsu et
al. 2024 (arXiv:2410.10989), section 3.2. Derivation and choice of the chunk: docs/kernels/linear_cross_entropy.md.

Shapes: x [M, H]; weight [V, H]; bias [V]; labels, losses [M]; logits of a chunk [n, V'].
Bytes moved beside the products, with elements of e bytes and labels of b bytes (what the kernels do):
    rows      per labelled row: V e + e + b read, V e + e written, 4 (loss); the second reading of the row, when the sum
              is known, finds it in the cache: a row is 61 KB of bf16, all that are in flight 40 MB
              without a label: b read, V e + 4 written;   without gradients: nothing is written but the loss
              with groups: theirs read beside the scores, each time; all rows read the same V, from the cache
    dbias     per chunk: n V' e read, 4 V written, from the second chunk on 4 V read
    scaled    per gradient of K elements: 4 K + 4 read, K times the bytes of its dtype written
Saved: dx, dweight, dbias (those wanted). The number of labelled rows is counted again in backward, on the device.
Precision: products accumulate in fp32, the dx and dweight of a chunk are never rounded; Z and dZ are rounded to the
dtype of x. dZ is that of the sum over rows, at most 1 in size: divided by the number of rows, fp16 would underflow.
Determinism: no atomics; every sum is taken in an order that shapes alone decide. No device sync.
"""

from collections.abc import Mapping, Set

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.reference.linear_cross_entropy import GRADIENTS, LinearCrossEntropy
from bert_fast.triton._cross_entropy_rows import LOWEST, _exp_of, _loss_and_lse, _or_nothing
from bert_fast.triton._gemm import product
from bert_fast.triton._launch import ceil_div
from bert_fast.triton._launch_plan import launch_plan
from bert_fast.triton._math import row_major
from bert_fast.triton.cross_entropy import divide_by_labelled, mean_of_labelled

# Of the logits of a chunk. A chunk costs one reading and one writing of dweight (2 x 94 MB at V = 30,522 and H = 768,
# 44 us at 4.3 TB/s) beside three products: 2,198 rows of bf16 take 390 us at 790 TFLOP/s, so it is 11 % of a chunk when
# nothing hides it, and 22 % with half the memory. 15 % of 16,384 tokens are two chunks, of 4,096 a part of one.
_CHUNK_BYTES = 2**27
_ROW_UNIT = 128  # chunks of whole tiles of the products, where there are that many rows
_WORD_UNIT = 64  # rows of logits begin at multiples of 128 bytes (bf16) or 256 (fp32)

_CHUNKS, _LANES_PER_WARP, _MAX_WARPS, _VECTOR_BYTES = 2, 64, 8, 16  # as in cross_entropy.py, where the reasons stand
# 477 programs of 64 columns (128 bytes of bf16 from each row) at V = 30,522; 64 rows of them in flight are 8 KB.
_SUM_ROWS, _SUM_COLS, _SUM_WARPS = 64, 64, 4
_SCALE_BLOCK, _SCALE_WARPS = 2048, 4  # four 128-bit loads of fp32 in flight per thread


@triton.jit
def _left_in(x, group, groups_ptr, is_label, mask):
    """Scores x, -inf where the class is of the row's group, but for the label's. mask: where there are classes."""
    groups = tl.load(groups_ptr, mask=mask, other=0)
    return tl.where((groups == group) & mask & (is_label == 0), float("-inf"), x)


@triton.jit(do_not_specialize=["n_cols", "ignore_index"])
def _linear_cross_entropy_rows_kernel(
    logits_ptr,
    labels_ptr,
    losses_ptr,
    row_groups_ptr,
    class_groups_ptr,
    row_stride,
    n_cols,
    ignore_index,
    smoothing,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    WANTS_GRADIENT: tl.constexpr,
):
    """One row of n_cols scores per program, row_stride elements from the next; the gradient is written over them.

    Rows begin at vectors, so all but the last few scores lie in whole ones: masks are the same within a vector. The
    last, fewer than a vector, are where the lanes start from. Groups are None, or say which classes a row leaves out.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row).to(tl.int64)
    is_labelled = label != ignore_index
    is_class = is_labelled & (label >= 0) & (label < n_cols)
    row_ptr = logits_ptr + row * row_stride
    z_label = tl.load(row_ptr + label, mask=is_class, other=0.0).to(tl.float32)

    n_vectors = n_cols // VECTOR
    n_read = tl.where(is_class, n_vectors, 0)
    lane = tl.arange(0, LANES)
    tail_col = n_vectors * VECTOR + lane
    tail_mask = (lane < VECTOR) & (tail_col < n_cols)
    tail_read = tail_mask & (tail_col < tl.where(is_class, n_cols, 0))
    tail = tl.load(row_ptr + tail_col, mask=tail_read, other=float("-inf")).to(tl.float32)
    group = None
    if class_groups_ptr is not None:
        group = tl.load(row_groups_ptr + row)
        tail = _left_in(tail, group, class_groups_ptr + tail_col, tail_col == label, tail_read)
    maximum = tl.maximum(tail, LOWEST)
    total = _exp_of(tail - maximum)
    distance = tl.where(tail_read, tail - z_label, 0.0)

    lane_vector = tl.arange(0, CHUNKS)[:, None, None] * LANES + lane[None, :, None]
    element = tl.arange(0, VECTOR)[None, None, :]
    for first in tl.range(0, n_read, CHUNKS * LANES):
        vector = first + lane_vector  # [CHUNKS, LANES, 1]
        mask = vector < n_read
        x = tl.load(row_major(row_ptr, vector * VECTOR + element, VECTOR), mask=mask, other=float("-inf")).to(
            tl.float32
        )
        if class_groups_ptr is not None:
            col = vector * VECTOR + element
            groups_ptr = row_major(class_groups_ptr, col, VECTOR)
            x = _left_in(x, group, groups_ptr, col == label, mask)
        higher = tl.maximum(maximum, tl.max(tl.max(x, 2), 0))
        exps = _exp_of(x - higher[None, :, None])
        total = total * _exp_of(maximum - higher) + tl.sum(tl.sum(exps, 2), 0)
        maximum = higher
        if HAS_SMOOTHING:
            distance += tl.sum(tl.sum(tl.where(mask, x - z_label, 0.0), 2), 0)

    row_maximum = tl.max(maximum, 0)
    row_total = tl.sum(total * _exp_of(maximum - row_maximum), 0)
    row_distance = tl.sum(distance, 0) if HAS_SMOOTHING else 0.0
    loss, _ = _loss_and_lse(row_maximum, row_total, z_label, row_distance, n_cols, smoothing, HAS_SMOOTHING)
    tl.store(losses_ptr + row, _or_nothing(loss, is_labelled, is_class))

    if WANTS_GRADIENT:
        # By maximum and sum: lse is rounded to 1e-3 for scores near 1e4. Without a label all terms are 0.
        row_maximum = tl.where(is_class, row_maximum, 0.0)
        inverse = _or_nothing(1.0 / row_total, is_labelled, is_class)
        share = tl.where(is_labelled, smoothing / n_cols, 0.0)
        for first in tl.range(0, n_vectors, CHUNKS * LANES):
            vector = first + lane_vector
            offset = vector * VECTOR + element
            x = tl.load(row_major(row_ptr, offset, VECTOR), mask=vector < n_read, other=0.0).to(tl.float32)
            if class_groups_ptr is not None:
                groups_ptr = row_major(class_groups_ptr, offset, VECTOR)
                x = _left_in(x, group, groups_ptr, offset == label, vector < n_read)
            dz = _exp_of(x - row_maximum) * inverse
            if HAS_SMOOTHING:
                dz -= share
            tl.store(row_major(row_ptr, offset, VECTOR), dz.to(logits_ptr.dtype.element_ty), mask=vector < n_vectors)
        tail = tl.where(is_class, tail, 0.0)
        tail_dz = _exp_of(tail - row_maximum) * inverse - share
        tl.store(row_ptr + tail_col, tail_dz.to(logits_ptr.dtype.element_ty), mask=tail_mask)
        # The label's alone once more, when whoever wrote it with the others has done so: no test of each column.
        tl.debug_barrier()
        dz_label = _exp_of(z_label - row_maximum) * inverse - (1.0 - smoothing) - share
        tl.store(row_ptr + label, dz_label.to(logits_ptr.dtype.element_ty), mask=is_class)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _linear_cross_entropy_dbias_kernel(
    dlogits_ptr,
    dbias_ptr,
    row_stride,
    n_rows,
    n_cols,
    ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """dbias = (dbias +) column sums of dlogits; BLOCK_COLS columns per program, which divides row_stride."""
    offs_n = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for first in tl.range(0, n_rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None]
        offset = row.to(tl.int64) * row_stride + offs_n[None, :]
        acc += tl.load(dlogits_ptr + offset, mask=row < n_rows, other=0.0).to(tl.float32)
    total = tl.sum(acc, 0)
    if ACCUMULATE:
        total += tl.load(dbias_ptr + offs_n, mask=offs_n < n_cols, other=0.0)
    tl.store(dbias_ptr + offs_n, total, mask=offs_n < n_cols)


@triton.jit
def _linear_cross_entropy_scale_kernel(gradient_ptr, scale_ptr, scaled_ptr, n_elements, BLOCK: tl.constexpr):
    """scaled = scale * gradient, rounded once; scaled may be gradient."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n_elements
    gradient = tl.load(gradient_ptr + offset, mask=mask, other=0.0)
    scaled = gradient * tl.load(scale_ptr)
    tl.store(scaled_ptr + offset, scaled.to(scaled_ptr.dtype.element_ty), mask=mask)


def padded_words(num_words: int) -> int:
    """Elements between rows of logits: the vocabulary rounded up to whole units."""
    return ceil_div(num_words, _WORD_UNIT) * _WORD_UNIT


def chunk_rows(num_rows: int, num_words: int, dtype: torch.dtype) -> int:
    """Rows of a chunk: within the budget, about as many in each, in whole tiles where there are that many."""
    most = max(1, _CHUNK_BYTES // (padded_words(num_words) * dtype.itemsize))
    if most > _ROW_UNIT:
        most -= most % _ROW_UNIT
    rows = ceil_div(num_rows, ceil_div(num_rows, most))
    return rows if rows <= _ROW_UNIT or rows == num_rows else min(most, ceil_div(rows, _ROW_UNIT) * _ROW_UNIT)


def row_warps(num_words: int, dtype: torch.dtype) -> int:
    """Warps of the program of a row: as many as fill one step, at most 8."""
    warp_elements = _CHUNKS * _LANES_PER_WARP * _VECTOR_BYTES // dtype.itemsize
    return min(_MAX_WARPS, 1 << (ceil_div(padded_words(num_words), warp_elements) - 1).bit_length())


def _rows(
    logits: Tensor, num_words: int, labels: Tensor, ignore_index: int, smoothing: float, wants_gradient: bool,
    losses: Tensor, row_groups: Tensor | None = None, class_groups: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills losses [n] of logits [n, V'], contiguous, whose first V columns count; their gradient overwrites these."""
    num_warps = row_warps(num_words, logits.dtype)
    launch_plan(
        _linear_cross_entropy_rows_kernel,
        CHUNKS=_CHUNKS,
        LANES=num_warps * _LANES_PER_WARP,
        VECTOR=_VECTOR_BYTES // logits.element_size(),
        HAS_SMOOTHING=smoothing > 0.0,
        WANTS_GRADIENT=wants_gradient,
        num_warps=num_warps,
        enable_fp_fusion=True,  # total * exp(maximum - higher) + sum
    )(
        (len(logits),),
        (logits, labels, losses, row_groups, class_groups),
        (logits.stride(0), num_words, ignore_index, smoothing),
    )


def _column_sums(dlogits: Tensor, dbias: Tensor, accumulate: bool) -> None:
    """dbias (fp32 [V]) = (dbias +) sums over the rows of dlogits [n, V'], contiguous."""
    launch_plan(
        _linear_cross_entropy_dbias_kernel,
        ACCUMULATE=accumulate,
        BLOCK_ROWS=_SUM_ROWS,
        BLOCK_COLS=_SUM_COLS,
        num_warps=_SUM_WARPS,
        enable_fp_fusion=True,
    )((ceil_div(len(dbias), _SUM_COLS),), (dlogits, dbias), (dlogits.stride(0), len(dlogits), len(dbias)))


def linear_cross_entropy_fwd(a: LinearCrossEntropy, wants: Set[str] = GRADIENTS) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss [], gradients of the sum by name), as `reference.linear_cross_entropy`.

    A label that is neither a class nor ignore_index makes the loss and the gradient of its row NaN.
    """
    x, weight, bias, labels, ignore_index, label_smoothing, row_groups, class_groups = a
    num_rows, num_words = len(x), len(weight)
    make = torch.empty if num_rows else torch.zeros
    shapes = {"x": x.shape, "weight": weight.shape} | ({} if bias is None else {"bias": bias.shape})
    made = {name: make(shape, dtype=torch.float32, device=x.device) for name, shape in shapes.items() if name in wants}
    losses = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    labels, narrow_weight = labels.contiguous(), weight.to(x.dtype)
    row_groups, class_groups = (None if t is None else t.contiguous() for t in (row_groups, class_groups))
    step = chunk_rows(num_rows, num_words, x.dtype) if num_rows else 1
    memory = torch.empty(min(step, num_rows), padded_words(num_words), dtype=x.dtype, device=x.device)
    for start in range(0, num_rows, step):
        rows, is_later = slice(start, start + step), start > 0
        x_rows = x[rows]
        chunk = memory[: len(x_rows)]  # [n, V']
        logits = chunk[:, :num_words]
        product(x_rows, narrow_weight.t(), bias, out=logits)
        groups = None if row_groups is None else row_groups[rows]
        _rows(
            chunk, num_words, labels[rows], ignore_index, label_smoothing, bool(made), losses[rows], groups,
            class_groups,
        )  # fmt: skip
        if "x" in made:
            product(logits, narrow_weight, out=made["x"][rows])
        if "weight" in made:
            product(logits.t(), x_rows, out=made["weight"], accumulate=is_later)
        if "bias" in made:
            _column_sums(chunk, made["bias"], is_later)
    return mean_of_labelled(losses, labels, ignore_index), made


def linear_cross_entropy_bwd(
    a: LinearCrossEntropy, dloss: Tensor, sums: Mapping[str, Tensor], may_overwrite: bool = False
) -> dict[str, Tensor]:
    """Gradients by name, as `reference.linear_cross_entropy`; with may_overwrite fp32 ones stay where they are."""
    scale = divide_by_labelled(dloss, a.labels, a.ignore_index)

    def scaled(gradient: Tensor, dtype: torch.dtype) -> Tensor:
        in_place = may_overwrite and dtype == gradient.dtype
        out = gradient if in_place else torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
        if gradient.numel():
            launch_plan(
                _linear_cross_entropy_scale_kernel,
                BLOCK=_SCALE_BLOCK,
                num_warps=_SCALE_WARPS,
                enable_fp_fusion=True,
            )((ceil_div(gradient.numel(), _SCALE_BLOCK),), (gradient, scale, out), (gradient.numel(),))
        return out

    return {name: scaled(t, a.x.dtype if name == "x" else a.weight.dtype) for name, t in sums.items()}
