"""Device helpers of relative positions: scores against windows of the distance table, and their gradients.

With E the table of distances -(M - 1) .. M - 1, p and r the positions of queries and keys,

    R[i, j] = q_i . E[p_i - r_j]  (+ k_j . E[p_i - r_j] with the key term)

A tile [M, N] of scores without holes in its positions knows M + N - 1 distances, so a window of WIDTH >= M + N rows of
the table is read at once, q is multiplied with all of it, and element (i, j) is picked out of row i of the product:
column p_i - r_j - first distance. Backward goes the other way: the gradients of row i are put at their distances, and
the result [M, WIDTH] is multiplied with the window (dq), or its transpose with q (the table's gradient). In a row every
distance occurs once, so nothing is added up on the way. Positions with holes only take more windows.

Positions (uint32 [M], [N]) are those of `load_names`: ascending from the tile's first token, which exists, and 0 past
the sequence's end. Tables have the dtype of q. A distance that the table does not hold counts as a row of zeros.

Source: Shaw et al. 2018 (arXiv:1803.02155), section 3.3, whose trick of multiplying before picking this is; Huang et
al. 2020 (arXiv:2009.13658), method 4, for the key term.
"""

import triton
import triton.language as tl

__all__ = ["WIDTH_OF_FP32", "relative_dk", "relative_dq", "relative_scores", "relative_table_gradient"]

WIDTH_OF_FP32 = 16


@triton.constexpr_function
def _width(table_ptr, num_queries, num_keys):
    """Rows of a window: all distances of a tile; in fp32, whose products take many registers, a few at a time."""
    return WIDTH_OF_FP32 if table_ptr.dtype.element_ty == tl.float32 else 2 * max(num_queries, num_keys)


@triton.jit
def _first_and_last(positions):
    """The smallest and largest position of a tile's tokens, int32."""
    positions = positions.to(tl.int32)
    first = tl.sum(tl.where(tl.arange(0, positions.shape[0]) == 0, positions, 0))
    return first, tl.max(positions)


@triton.jit
def _window(table, first_distance, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows [WIDTH, BLOCK_D] of the table from a distance on."""
    rows = first_distance + (table.num_distances - 1) // 2 + tl.arange(0, WIDTH)
    cols = tl.arange(0, BLOCK_D)
    mask = ((rows >= 0) & (rows < table.num_distances))[:, None] & (cols < D)[None, :]
    return tl.load(table.ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _pick(products, columns):
    """products[i, columns[i, j]], 0 where there is no such column."""
    NUM: tl.constexpr = products.shape[1]
    exists = (columns >= 0) & (columns < NUM)
    return tl.where(exists, tl.gather(products, tl.minimum(tl.maximum(columns, 0), NUM - 1), 1), 0.0)


@triton.jit
def relative_scores(q, k, position_q, position_k, table, D: tl.constexpr, PRECISION: tl.constexpr):
    """R [M, N], fp32, of q [M, BLOCK_D] and k [N, BLOCK_D] and the `Table`; not scaled."""
    BLOCK_D: tl.constexpr = q.shape[1]
    WIDTH: tl.constexpr = _width(table.ptr, q.shape[0], k.shape[0])
    first_q, last_q = _first_and_last(position_q)
    first_k, last_k = _first_and_last(position_k)
    distances = position_q.to(tl.int32)[:, None] - position_k.to(tl.int32)[None, :]
    scores = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    for first in tl.range(first_q - last_k, last_q - first_k + 1, WIDTH, num_stages=1):
        e = tl.trans(_window(table, first, D, BLOCK_D, WIDTH))
        scores += _pick(tl.dot(q, e, input_precision=PRECISION), distances - first)
        if table.key_term:
            scores += tl.trans(_pick(tl.dot(k, e, input_precision=PRECISION), tl.trans(distances - first)))
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
    """[M, BLOCK_D], fp32: the sum over keys of ds[i, j] E[p_i - r_j], for ds [M, N]."""
    NUM: tl.constexpr = ds.shape[1]
    WIDTH: tl.constexpr = _width(table.ptr, ds.shape[0], ds.shape[1])
    first_q, last_q = _first_and_last(position_q)
    first_k, last_k = _first_and_last(position_k)
    dq = tl.zeros([ds.shape[0], BLOCK_D], tl.float32)
    for start_k in tl.range(first_k, last_k + 1, NUM, num_stages=1):
        end_k = tl.minimum(start_k + NUM - 1, last_k)
        for first in tl.range(first_q - end_k, last_q - start_k + 1, WIDTH, num_stages=1):
            e = _window(table, first, D, BLOCK_D, WIDTH)
            by_distance = _by_distance(ds, position_q, position_k, start_k, first, 1, WIDTH)
            dq = tl.dot(by_distance.to(e.dtype), e, dq, input_precision=PRECISION)
    return dq


@triton.jit
def relative_dk(ds, position_q, position_k, table, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """[N, BLOCK_D], fp32: the sum over queries of ds[i, j] E[p_i - r_j], for ds [M, N]."""
    NUM: tl.constexpr = ds.shape[0]
    WIDTH: tl.constexpr = _width(table.ptr, ds.shape[0], ds.shape[1])
    first_q, last_q = _first_and_last(position_q)
    first_k, last_k = _first_and_last(position_k)
    dk = tl.zeros([ds.shape[1], BLOCK_D], tl.float32)
    for start_q in tl.range(first_q, last_q + 1, NUM, num_stages=1):
        end_q = tl.minimum(start_q + NUM - 1, last_q)
        for first in tl.range(start_q - last_k, end_q - first_k + 1, WIDTH, num_stages=1):
            e = _window(table, first, D, BLOCK_D, WIDTH)
            by_distance = _by_distance(tl.trans(ds), position_k, position_q, start_q, first, -1, WIDTH)
            dk = tl.dot(by_distance.to(e.dtype), e, dk, input_precision=PRECISION)
    return dk


@triton.jit
def relative_table_gradient(
    dtable, ds, q, k, position_q, position_k, first_distance, KEY_TERM: tl.constexpr, PRECISION: tl.constexpr
):
    """dtable [WIDTH, BLOCK_D], fp32, the window's rows from first_distance on, plus what one tile ds [M, N] gives.

    The loops are `while`, in which each product is waited for. In a `for`, Triton 3.6 and 3.7 let it run on to the next
    round on Hopper, which overwrites its first operand's registers while it may still read them (triton#9433).
    """
    WIDTH: tl.constexpr = dtable.shape[0]
    NUM_Q: tl.constexpr = ds.shape[0]
    NUM_K: tl.constexpr = ds.shape[1]
    first_k, last_k = _first_and_last(position_k)
    start_k = first_k
    while start_k <= last_k:
        by_distance = _by_distance(ds, position_q, position_k, start_k, first_distance, 1, WIDTH)
        dtable = tl.dot(tl.trans(by_distance.to(q.dtype)), q, dtable, input_precision=PRECISION)
        start_k += NUM_K
    if KEY_TERM:
        first_q, last_q = _first_and_last(position_q)
        start_q = first_q
        while start_q <= last_q:
            by_distance = _by_distance(tl.trans(ds), position_k, position_q, start_q, first_distance, -1, WIDTH)
            dtable = tl.dot(tl.trans(by_distance.to(k.dtype)), k, dtable, input_precision=PRECISION)
            start_q += NUM_Q
    return dtable
