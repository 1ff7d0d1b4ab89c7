"""Device helpers of the attention kernels: where tiles lie, which of their scores exist, which probabilities are kept.

Scores live in base 2: with c = softmax_scale * log2(e), exp(softmax_scale * s - lse) is exp2(c * s - log2(e) * lse),
one multiply-add and one instruction of the special function unit.

A tile is *plain* where every score exists and nothing but q and k enters it: no bounds, no causality, no bias. Most
tiles are, and the instructions that the others need would be a third of theirs; so kernels walk plain tiles in a loop
of their own.

Relative positions. With C and P a head's tables (relative_keys, relative_queries) of distances -(M - 1) .. M - 1, p and
r the positions of queries and keys,

    R[i, j] = q_i . C[p_i - r_j] + k_j . P[p_i - r_j]       either or both

A tile [M, N] of scores without holes in its positions knows M + N - 1 distances, so a window of WIDTH >= M + N rows of
C is read at once, q is multiplied with all of it, and element (i, j) is picked out of row i of the product: column
p_i - r_j - first distance. Backward goes the other way: the gradients of row i are put at their distances, and the
result [M, WIDTH] is multiplied with the window (dq), or its transpose with q (the gradient of C). In a row every
distance occurs once, so nothing is added up on the way. Positions with holes only take more windows. P likewise, with
keys for rows.

Positions (uint32 [M], [N]) are those of `load_names`: ascending from the tile's first token, which exists, and 0 past
the sequence's end. Tables [2M - 1, A, D] are contiguous and have the dtype of q. A distance that a table does not hold
counts as a row of zeros.

Source: Shaw et al. 2018 (arXiv:1803.02155), section 3.3, whose trick of multiplying before picking this is; Huang et
al. 2020 (arXiv:2009.13658), method 4, for keys.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bert_fast.triton._math import philox4x32

LOG2E = tl.constexpr(1.4426950408889634)
# Arguments that change from batch to batch: specialized for, each would compile kernels again. For `do_not_specialize`.
VARYING = [
    "num_tokens", "num_blocks", "drop_max", "site", "bias_row_stride", "bias_head_stride", "bias_q_stride",
    "bias_extent",
]  # fmt: skip
_BLOCKS_PER_HEAD = tl.constexpr(65536 // 8)  # Philox blocks of one head: reference/dropout.py, HEAD_STRIDE


# What helpers are given together: structures of the compiler's, which the machine's code shows nothing of. Arguments of
# kernels stay flat, as Triton specialises each by itself; and structures are made in kernels, since Triton 3.6 makes
# tensors of what functions return, and there is none of None.
class Bias(NamedTuple):
    """A bias at one row of the batch and head; ptr is None where there is none."""

    ptr: Any
    q_stride: Any
    k_stride: Any
    extent: Any  # elements from ptr to the tensor's end: nothing beyond is read


class Table(NamedTuple):
    """A table of relative positions at one head; ptr is None where there is none."""

    ptr: Any
    offset: Any  # of the head, int64
    row_stride: Any
    num_distances: Any


class Extras(NamedTuple):
    """What enters scores by the positions of queries and keys."""

    bias: Any
    relative_keys: Any  # tables: what queries are multiplied with,
    relative_queries: Any  # and what keys are


class Drop(NamedTuple):
    """What names a dropout mask beside its tokens; k0 is None where nothing is dropped."""

    k0: Any
    k1: Any
    site: Any
    drop_max: Any  # see `_math.keep_values`
    head: Any


class Keys(NamedTuple):
    """One sequence's keys and values, of one head."""

    k_ptr: Any
    v_ptr: Any
    k_stride: Any
    v_stride: Any
    coords_ptr: Any
    num: Any


@triton.jit
def locate(num_blocks, num_heads, order_ptr):
    """Block, head and sequence of this program; blocks of a head follow one another, so they share k and v in L2.

    order_ptr (int32 [B], or None): the n-th sequence to work on.
    """
    program = tl.program_id(0)
    block = program % num_blocks
    head = (program // num_blocks) % num_heads
    sequence = program // num_blocks // num_heads
    if order_ptr is not None:
        sequence = tl.load(order_ptr + sequence)
    return block, head, sequence


@triton.jit
def sequence_span(cu_seqlens_ptr, sequence):
    """First token (int64: offsets pass 2^31) and number of tokens (int32) of a sequence."""
    start = tl.load(cu_seqlens_ptr + sequence)
    return start.to(tl.int64), tl.load(cu_seqlens_ptr + sequence + 1) - start


@triton.jit
def load_rows(ptr, row_stride, rows, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECKED: tl.constexpr):
    """Tile [len(rows), BLOCK_D] of one head; 0 in columns from D on and, where CHECKED, in rows from num_rows on.

    Zeros, not whatever follows the sequence: its neighbour may hold a NaN, and 0 * NaN would leak.
    """
    cols = tl.arange(0, BLOCK_D)
    pointers = ptr + rows[:, None] * row_stride + cols[None, :]
    if CHECKED:
        if D == BLOCK_D:
            return tl.load(pointers, mask=(rows < num_rows)[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=(rows < num_rows)[:, None] & (cols < D)[None, :], other=0.0)
    else:
        if D == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(cols < D)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, row_stride, rows, num_rows, tile, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores tile [len(rows), BLOCK_D] of one head in ptr's dtype."""
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None]
    if D != BLOCK_D:
        mask = mask & (cols < D)[None, :]
    tl.store(ptr + rows[:, None] * row_stride + cols[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_positions(coords_ptr, rows, num_rows):
    """Positions, uint32, of a sequence's tokens; coords_ptr is that of its first token."""
    return tl.load(coords_ptr + rows * 2 + 1, mask=rows < num_rows, other=0).to(tl.uint32)


@triton.jit
def load_names(coords_ptr, rows, num_rows):
    """(batch row, position), uint32, of a sequence's tokens; coords_ptr is that of its first token."""
    batch_row = tl.load(coords_ptr + rows * 2, mask=rows < num_rows, other=0).to(tl.uint32)
    return batch_row, load_positions(coords_ptr, rows, num_rows)


@triton.jit
def load_lse(ptr, rows, num_rows, CHECKED: tl.constexpr):
    """Log-sum-exp in base 2; +inf, whose exp2(-lse) is 0, for queries that do not exist or see no key."""
    if CHECKED:
        lse = tl.load(ptr + rows, mask=rows < num_rows, other=float("inf"))
        return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    else:
        return tl.load(ptr + rows) * LOG2E


@triton.jit
def keep_tile(drop, batch_row, position, first_key, BLOCK_N: tl.constexpr):
    """The dropout mask of a tile [BLOCK_M, BLOCK_N] of probabilities, as `reference/dropout.py` defines it.

    batch_row, position (uint32 [BLOCK_M]): names of the queries. first_key: ordinal of the tile's first key, a multiple
    of 32.
    Returns: bool [BLOCK_M, BLOCK_N], True where kept.

    The 8 values of a block are the columns 8i + 2j + e of 32 that one thread of a tensor core's accumulator holds (j:
    its number among 4 neighbours). Its rows are r and 8 + r of the 16 of its warp, which follow one another (h). So
    words are drawn as [h, group, warp, r, j], which Triton deals out to threads in just this way, its last dimensions
    over a warp, the one before them over warps: what moves is names of registers. As [M, groups * 4] it would deal them
    out otherwise, and send all words through shared memory.
    """
    WARPS: tl.constexpr = position.shape[0] // 16
    GROUPS: tl.constexpr = BLOCK_N // 32
    block = (drop.head * _BLOCKS_PER_HEAD + first_key // 8).to(tl.uint32) + tl.arange(0, GROUPS * 4).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        tl.reshape(block, [1, GROUPS, 1, 1, 4]), _by_warp(position), _by_warp(batch_row), drop.site.to(tl.uint32),
        drop.k0, drop.k1,
    )  # fmt: skip
    # Joining words by the bits of i, slowest first, and halves last: see `_math.keep_values`.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    values = tl.reshape(tl.join(words << 16, words), [2, GROUPS, WARPS, 8, 4, 4, 2])  # [h, group, warp, r, j, i, e]
    values = tl.permute(values, [2, 0, 3, 1, 5, 4, 6])  # [warp, h, r, group, i, j, e]
    return tl.reshape(values, [position.shape[0], BLOCK_N]) > drop.drop_max.to(tl.uint32)


@triton.jit
def dropped(p, keep, scale):
    """p where kept, else 0. scale: any finite number that is not known when compiling.

    Of a 0 that is known LLVM makes a choice between numbers that are rounded already, two to a register: three
    instructions where this takes one. (What is used twice is not rounded first: backward needs no such 0.)
    """
    return tl.where(keep, p, scale * 0.0)


@triton.jit
def _by_warp(x):
    """[M] as [h, 1, warp, r, 1], of which it is number 16 * warp + 8 * h + r."""
    WARPS: tl.constexpr = x.shape[0] // 16
    return tl.reshape(tl.permute(tl.reshape(x, [WARPS, 2, 8]), [1, 0, 2]), [2, 1, WARPS, 8, 1])


@triton.jit
def gradients_of_scores(p, w, dw, delta, DIFFER: tl.constexpr):
    """dS / z [M, N] = w * dw - p * delta. DIFFER: w is not p.

    Written as it is, dropout selects w alone, not dw too. Where w is p, p * (dw - delta) is a few percent faster (an
    H200, S = 512: 266 for 283 us of all backward), with as many instructions.
    """
    if DIFFER:
        return w * dw - p * delta[:, None]
    else:
        return p * (dw - delta[:, None])


@triton.jit
def bias_at(bias, row_stride, head_stride, row, head):
    """A bias moved on to one row of the batch and head.

    Its extent is negative for a row past the end. Nothing beyond is read: where no one checks that a bias reaches all
    rows and positions, one that does not must not read foreign memory.
    """
    offset = row.to(tl.uint32).to(tl.int64) * row_stride + head * head_stride
    return Bias(bias.ptr + offset, bias.q_stride, bias.k_stride, bias.extent - offset)


@triton.jit
def _bias_tile(bias, position_q, position_k, mask):
    """Tile [M, N], fp32, of a bias at the tokens' positions; 0 where mask is False."""
    offsets = position_q.to(tl.int64)[:, None] * bias.q_stride + position_k.to(tl.int64)[None, :] * bias.k_stride
    return tl.load(bias.ptr + offsets, mask=mask & (offsets < bias.extent), other=0.0).to(tl.float32)


@triton.jit
def mask_scores(scores, exists, position_q, position_k, bias, CAUSAL: tl.constexpr):
    """Scores in base 2 with the bias added and -inf where a score does not exist or causality hides the key.

    exists (bool, broadcastable to the tile): both tokens exist. bias: a `Bias`. Positions may be None where
    neither bias nor causality asks.
    """
    if bias.ptr is not None:
        scores += _bias_tile(bias, position_q, position_k, exists) * LOG2E
    if CAUSAL:
        exists = exists & (position_k[None, :] <= position_q[:, None])
    return tl.where(exists, scores, float("-inf"))


@triton.jit
def visible_keys(
    coords_q_ptr, coords_k_ptr, first_query, num_queries, num_keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_PLAIN: tl.constexpr,
):  # fmt: skip
    """(end, plain): a block of queries sees no key from `end` on; tiles up to key `plain` are plain ones.

    Positions ascend, so the n-th key stands at the first one's position + n or later, and no later than the last key's
    position less what still follows: bounds that are exact where positions have no holes, and safe where they have.
    """
    end = num_keys
    plain = num_keys
    if CAUSAL:  # noqa: SIM102 -- known when compiling; joined to the next it would not be
        if num_keys > 0:
            last_query = tl.minimum(first_query + BLOCK_M, num_queries) - 1
            last_position = tl.load(coords_q_ptr + last_query * 2 + 1)
            end = tl.minimum(num_keys, last_position - tl.load(coords_k_ptr + 1) + 1)
            last_key_position = tl.load(coords_k_ptr + (num_keys - 1) * 2 + 1)
            seen_by_all = tl.load(coords_q_ptr + first_query * 2 + 1) - last_key_position + num_keys
            plain = tl.maximum(tl.minimum(seen_by_all, num_keys), 0)
    if HAS_PLAIN:
        return end, plain // BLOCK_N * BLOCK_N
    else:
        return end, 0


WIDTH_OF_FP32 = 16


@triton.constexpr_function
def _width(dtype, num_queries, num_keys):
    """Rows of a window: all distances of a tile; in fp32, whose products take many registers, a few at a time."""
    return WIDTH_OF_FP32 if dtype == tl.float32 else 2 * max(num_queries, num_keys)


@triton.jit
def _first_and_last(positions):
    """The smallest and largest position of a tile's tokens, int32."""
    positions = positions.to(tl.int32)
    first = tl.sum(tl.where(tl.arange(0, positions.shape[0]) == 0, positions, 0))
    return first, tl.max(positions)


@triton.jit
def _window(table, first_distance, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows [WIDTH, BLOCK_D] of a table from a distance on."""
    first_row = first_distance + (table.num_distances - 1) // 2
    nums = tl.arange(0, WIDTH)
    cols = tl.arange(0, BLOCK_D)
    rows = first_row + nums
    mask = ((rows >= 0) & (rows < table.num_distances))[:, None] & (cols < D)[None, :]
    start = table.ptr + table.offset + first_row.to(tl.int64) * table.row_stride
    return tl.load(start + nums[:, None] * table.row_stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _pick(products, columns):
    """products[i, columns[i, j]], 0 where there is no such column."""
    NUM: tl.constexpr = products.shape[1]
    exists = (columns >= 0) & (columns < NUM)
    return tl.where(exists, tl.gather(products, tl.minimum(tl.maximum(columns, 0), NUM - 1), 1), 0.0)


@triton.jit
def relative_scores(q, k, position_q, position_k, extras, D: tl.constexpr, PRECISION: tl.constexpr):
    """R [M, N], fp32, of q [M, BLOCK_D] and k [N, BLOCK_D] and the tables of `Extras`; not scaled."""
    BLOCK_D: tl.constexpr = q.shape[1]
    WIDTH: tl.constexpr = _width(q.dtype, q.shape[0], k.shape[0])
    first_q, last_q = _first_and_last(position_q)
    first_k, last_k = _first_and_last(position_k)
    distances = position_q.to(tl.int32)[:, None] - position_k.to(tl.int32)[None, :]
    scores = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    for first in tl.range(first_q - last_k, last_q - first_k + 1, WIDTH, num_stages=1):
        if extras.relative_keys.ptr is not None:
            c = tl.trans(_window(extras.relative_keys, first, D, BLOCK_D, WIDTH))
            scores += _pick(tl.dot(q, c, input_precision=PRECISION), distances - first)
        if extras.relative_queries.ptr is not None:
            p = tl.trans(_window(extras.relative_queries, first, D, BLOCK_D, WIDTH))
            scores += tl.trans(_pick(tl.dot(k, p, input_precision=PRECISION), tl.trans(distances - first)))
    return scores


@triton.jit
def _by_distance(ds, position_rows, position_cols, first_col, first_distance, SIGN: tl.constexpr, WIDTH: tl.constexpr):
    """[R, WIDTH]: in row i at column w ds[i, j] of the token j at distance first_distance + w, 0 where there is none.

    ds [R, C]; SIGN: 1 where a row less a column is the distance (rows are queries), -1 where it is the other way.
    Knows the tokens j at the C positions from first_col on.
    """
    NUM: tl.constexpr = ds.shape[1]
    nums = tl.arange(0, NUM)
    # Where no token stands: NUM. Tokens past the end stand at 0, but never before one that is there.
    is_at = (first_col + nums)[:, None] == position_cols.to(tl.int32)[None, :]
    token_at = tl.min(tl.where(is_at, nums[None, :], NUM), 1)
    by_position = _pick(ds, tl.broadcast_to(token_at[None, :], ds.shape))
    distances = first_distance + tl.arange(0, WIDTH)
    return _pick(by_position, position_rows.to(tl.int32)[:, None] - SIGN * distances[None, :] - first_col)


@triton.jit
def relative_dq(ds, position_q, position_k, table, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """[M, BLOCK_D], fp32: the sum over keys of ds[i, j] C[p_i - r_j], for ds [M, N]."""
    NUM: tl.constexpr = ds.shape[1]
    WIDTH: tl.constexpr = _width(table.ptr.dtype.element_ty, ds.shape[0], ds.shape[1])
    first_q, last_q = _first_and_last(position_q)
    first_k, last_k = _first_and_last(position_k)
    dq = tl.zeros([ds.shape[0], BLOCK_D], tl.float32)
    for start_k in tl.range(first_k, last_k + 1, NUM, num_stages=1):
        end_k = tl.minimum(start_k + NUM - 1, last_k)
        for first in tl.range(first_q - end_k, last_q - start_k + 1, WIDTH, num_stages=1):
            c = _window(table, first, D, BLOCK_D, WIDTH)
            by_distance = _by_distance(ds, position_q, position_k, start_k, first, 1, WIDTH)
            dq = tl.dot(by_distance.to(c.dtype), c, dq, input_precision=PRECISION)
    return dq


@triton.jit
def relative_dk(ds, position_q, position_k, table, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """[N, BLOCK_D], fp32: the sum over queries of ds[i, j] P[p_i - r_j], for ds [M, N]."""
    NUM: tl.constexpr = ds.shape[0]
    WIDTH: tl.constexpr = _width(table.ptr.dtype.element_ty, ds.shape[0], ds.shape[1])
    first_q, last_q = _first_and_last(position_q)
    first_k, last_k = _first_and_last(position_k)
    dk = tl.zeros([ds.shape[1], BLOCK_D], tl.float32)
    for start_q in tl.range(first_q, last_q + 1, NUM, num_stages=1):
        end_q = tl.minimum(start_q + NUM - 1, last_q)
        for first in tl.range(start_q - last_k, end_q - first_k + 1, WIDTH, num_stages=1):
            p = _window(table, first, D, BLOCK_D, WIDTH)
            by_distance = _by_distance(tl.trans(ds), position_k, position_q, start_q, first, -1, WIDTH)
            dk = tl.dot(by_distance.to(p.dtype), p, dk, input_precision=PRECISION)
    return dk


@triton.jit
def add_table_gradient(
    dtable, ds, x, position_rows, position_cols, first_distance, SIGN: tl.constexpr, PRECISION: tl.constexpr
):
    """dtable [WIDTH, BLOCK_D], fp32, the window's rows from first_distance on, plus what one tile ds [R, C] gives.

    x [R, BLOCK_D]: queries, SIGN 1, for relative_keys; keys, SIGN -1, for relative_queries.

    The loop is a `while`, in which each product is waited for. In a `for`, Triton 3.6 and 3.7 let it run on to the next
    round on Hopper, which overwrites its first operand's registers while it may still read them (triton#9433).
    """
    WIDTH: tl.constexpr = dtable.shape[0]
    NUM: tl.constexpr = ds.shape[1]
    first_col, last_col = _first_and_last(position_cols)
    start_col = first_col
    while start_col <= last_col:
        by_distance = _by_distance(ds, position_rows, position_cols, start_col, first_distance, SIGN, WIDTH)
        dtable = tl.dot(tl.trans(by_distance.to(x.dtype)), x, dtable, input_precision=PRECISION)
        start_col += NUM
    return dtable
