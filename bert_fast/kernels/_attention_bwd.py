"""Backward kernels of attention over tiles: dq by blocks of queries, dk and dv by blocks of keys; no atomics.

Both make P again from q, k and lse: 7 matrix products where one kernel with atomics on dq needs 5. With z = 1 / (1 - p)
of dropout, K the keep mask and m the head mask,

    dS = P * (z * (dout v^T * K * m) - delta) = z * P * (dout v^T * K * m - delta / z)

so the accumulators take the sums without z and softmax_scale, which multiply them once at the end.
"""

import triton
import triton.language as tl

from bert_fast.kernels._attention import (
    LOG2E,
    VARYING,
    factor_of,
    factor_tile,
    keep_tile,
    load_lse,
    load_names,
    load_positions,
    load_rows,
    locate,
    mask_scores,
    sequence_span,
    store_rows,
    visible_keys,
)
from bert_fast.kernels._attention_relative import relative_dk, relative_dq, relative_scores
from bert_fast.kernels._math import split_seed

__all__ = ["_attention_bwd_dkdv_kernel", "_attention_bwd_dq_kernel", "probabilities_and_gradients"]


@triton.jit
def probabilities_and_gradients(
    q, k, v, dout, lse, delta, offs_m, offs_n, num_queries, num_keys, first_key, scale_log2, batch_row, position_q,
    position_k, k0, k1, drop_max, site, head, bias_ptr, bias_q_stride, bias_k_stride, bias_extent, head_mask_ptr,
    head_mask_q_stride, head_mask_k_stride, head_mask_extent, table_ptr, num_distances, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, KEY_TERM: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PLAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(w, ds) [M, N] of one tile: W / z and dS / z, fp32. lse in base 2, delta already divided by z."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    exists = (offs_m < num_queries)[:, None] & (offs_n < num_keys)[None, :]
    if not PLAIN:
        if table_ptr is not None:
            scores += relative_scores(
                q, k, position_q, position_k, table_ptr, num_distances, D, BLOCK_D, KEY_TERM, PRECISION
            )
        scores = mask_scores(
            scores * scale_log2, exists, position_q, position_k, bias_ptr, bias_q_stride, bias_k_stride, bias_extent,
            CAUSAL,
        )  # fmt: skip
        p = tl.exp2(scores - lse[:, None])
    else:
        p = tl.exp2(scores * scale_log2 - lse[:, None])
    dw = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    w = p
    if HAS_DROPOUT:
        keep = keep_tile(k0, k1, site, batch_row, position_q, head, first_key, drop_max, BLOCK_N)
        w = tl.where(keep, w, 0.0)
        dw = tl.where(keep, dw, 0.0)
    if head_mask_ptr is not None:
        m = factor_tile(
            head_mask_ptr, head_mask_q_stride, head_mask_k_stride, head_mask_extent, position_q, position_k, exists
        )
        w *= m
        dw *= m
    return w, p * (dw - delta[:, None])


@triton.jit
def _add_keys(
    dq, q, dout, lse, delta, offs_m, num_queries, k_ptr, v_ptr, k_stride, v_stride, first_key, num_keys, scale_log2,
    batch_row, position_q, coords_k_ptr, k0, k1, drop_max, site, head, bias_ptr, bias_q_stride, bias_k_stride,
    bias_extent, head_mask_ptr, head_mask_q_stride, head_mask_k_stride, head_mask_extent, table_ptr, num_distances,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, KEY_TERM: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PLAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of keys added to dq [M, BLOCK_D]."""
    offs_n = first_key + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, k_stride, offs_n, num_keys, D, BLOCK_D, not PLAIN)
    v = load_rows(v_ptr, v_stride, offs_n, num_keys, D, BLOCK_D, not PLAIN)
    position_k = None
    if CAUSAL or bias_ptr is not None or head_mask_ptr is not None or table_ptr is not None:
        position_k = load_positions(coords_k_ptr, offs_n, num_keys)
    _, ds = probabilities_and_gradients(
        q, k, v, dout, lse, delta, offs_m, offs_n, num_queries, num_keys, first_key, scale_log2, batch_row, position_q,
        position_k, k0, k1, drop_max, site, head, bias_ptr, bias_q_stride, bias_k_stride, bias_extent, head_mask_ptr,
        head_mask_q_stride, head_mask_k_stride, head_mask_extent, table_ptr, num_distances, D, BLOCK_D, BLOCK_N, CAUSAL,
        KEY_TERM, HAS_DROPOUT, PLAIN, PRECISION,
    )  # fmt: skip
    if table_ptr is not None:
        dq += relative_dq(ds, position_q, position_k, table_ptr, num_distances, D, BLOCK_D, PRECISION)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=VARYING)
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, dq_ptr, lse_ptr, delta_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, order_ptr,
    coords_q_ptr, coords_k_ptr, seed_ptr, bias_ptr, head_mask_ptr, table_ptr, q_stride, q_head_stride, k_stride,
    k_head_stride, v_stride, v_head_stride, dout_stride, dout_head_stride, bias_row_stride, bias_head_stride,
    bias_q_stride, bias_k_stride, bias_extent, head_mask_row_stride, head_mask_head_stride, head_mask_q_stride,
    head_mask_k_stride, head_mask_extent, num_distances, num_tokens, num_blocks, num_heads, softmax_scale,
    dropout_scale, inverse_scale, drop_max, site, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, KEY_TERM: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_PLAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head; also their delta, which the other kernel reads.

    PARTS: rows [A * D] of a token in the tensor that dq lies in: 1 if it is of its own, 3 if [T, 3, A, D].
    """
    block, head, sequence = locate(num_blocks, num_heads, order_ptr)
    start_q, num_queries = sequence_span(cu_seqlens_q_ptr, sequence)
    first_query = block * BLOCK_M
    if first_query >= num_queries:
        return
    start_k, num_keys = sequence_span(cu_seqlens_k_ptr, sequence)
    wide_head = head.to(tl.int64)
    scale_log2 = softmax_scale * LOG2E

    offs_m = first_query + tl.arange(0, BLOCK_M)
    k_ptr += start_k * k_stride + wide_head * k_head_stride
    v_ptr += start_k * v_stride + wide_head * v_head_stride
    q = load_rows(
        q_ptr + start_q * q_stride + wide_head * q_head_stride, q_stride, offs_m, num_queries, D, BLOCK_D, True
    )
    dout_ptr += start_q * dout_stride + wide_head * dout_head_stride
    dout = load_rows(dout_ptr, dout_stride, offs_m, num_queries, D, BLOCK_D, True)
    out_ptr += (start_q * num_heads + wide_head) * D  # contiguous
    out = load_rows(out_ptr, num_heads * D, offs_m, num_queries, D, BLOCK_D, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)  # [M]
    statistics = wide_head * num_tokens + start_q
    tl.store(delta_ptr + statistics + offs_m, delta, mask=offs_m < num_queries)
    delta *= inverse_scale
    lse = load_lse(lse_ptr + statistics, offs_m, num_queries, True)

    batch_row, position_q, k0, k1 = None, None, None, None
    HAS_EXTRAS: tl.constexpr = bias_ptr is not None or head_mask_ptr is not None or table_ptr is not None
    if HAS_DROPOUT or CAUSAL or HAS_EXTRAS:
        coords_q_ptr += start_q * 2
        batch_row, position_q = load_names(coords_q_ptr, offs_m, num_queries)
    if CAUSAL or HAS_EXTRAS:
        coords_k_ptr += start_k * 2
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
    if HAS_EXTRAS:
        sequence_row = tl.load(coords_q_ptr)
        if bias_ptr is not None:
            bias_ptr, bias_extent = factor_of(
                bias_ptr, bias_extent, sequence_row, wide_head, bias_row_stride, bias_head_stride
            )
        if head_mask_ptr is not None:
            head_mask_ptr, head_mask_extent = factor_of(
                head_mask_ptr, head_mask_extent, sequence_row, wide_head, head_mask_row_stride, head_mask_head_stride
            )

    end, num_plain = visible_keys(
        coords_q_ptr, coords_k_ptr, first_query, num_queries, num_keys, BLOCK_M, BLOCK_N, CAUSAL, HAS_PLAIN
    )
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_PLAIN:
        for first_key in tl.range(0, num_plain, BLOCK_N):
            dq = _add_keys(
                dq, q, dout, lse, delta, offs_m, num_queries, k_ptr, v_ptr, k_stride, v_stride, first_key, num_keys,
                scale_log2, batch_row, position_q, None, k0, k1, drop_max, site, head, None, 0, 0, 0, None, 0, 0, 0,
                None, 0, D, BLOCK_D, BLOCK_N, False, False, HAS_DROPOUT, True, PRECISION,
            )  # fmt: skip
    for first_key in tl.range(num_plain, end, BLOCK_N, num_stages=1):
        dq = _add_keys(
            dq, q, dout, lse, delta, offs_m, num_queries, k_ptr, v_ptr, k_stride, v_stride, first_key, num_keys,
            scale_log2, batch_row, position_q, coords_k_ptr, k0, k1, drop_max, site, head, bias_ptr, bias_q_stride,
            bias_k_stride, bias_extent, head_mask_ptr, head_mask_q_stride, head_mask_k_stride, head_mask_extent,
            table_ptr, num_distances, D, BLOCK_D, BLOCK_N, CAUSAL, KEY_TERM, HAS_DROPOUT, False, PRECISION,
        )  # fmt: skip
    dq *= softmax_scale * dropout_scale
    dq_ptr += (start_q * num_heads * PARTS + wide_head) * D
    store_rows(dq_ptr, num_heads * D, offs_m * PARTS, num_queries * PARTS, dq, D, BLOCK_D)


@triton.jit
def _add_queries(
    dk, dv, k, v, offs_n, num_keys, q_ptr, dout_ptr, lse_ptr, delta_ptr, q_stride, dout_stride, first_query,
    num_queries, first_key, scale_log2, inverse_scale, coords_q_ptr, position_k, k0, k1, drop_max, site, head, bias_ptr,
    bias_q_stride, bias_k_stride, bias_extent, head_mask_ptr, head_mask_q_stride, head_mask_k_stride, head_mask_extent,
    table_ptr, num_distances, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, KEY_TERM: tl.constexpr, HAS_DROPOUT: tl.constexpr, PLAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of queries added to dk, dv [N, BLOCK_D]."""
    offs_m = first_query + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr, q_stride, offs_m, num_queries, D, BLOCK_D, not PLAIN)
    dout = load_rows(dout_ptr, dout_stride, offs_m, num_queries, D, BLOCK_D, not PLAIN)
    lse = load_lse(lse_ptr, offs_m, num_queries, not PLAIN)
    if PLAIN:
        delta = tl.load(delta_ptr + offs_m) * inverse_scale
    else:
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < num_queries, other=0.0) * inverse_scale
    batch_row, position_q = None, None
    if HAS_DROPOUT or CAUSAL or bias_ptr is not None or head_mask_ptr is not None or table_ptr is not None:
        batch_row, position_q = load_names(coords_q_ptr, offs_m, num_queries)
    w, ds = probabilities_and_gradients(
        q, k, v, dout, lse, delta, offs_m, offs_n, num_queries, num_keys, first_key, scale_log2, batch_row, position_q,
        position_k, k0, k1, drop_max, site, head, bias_ptr, bias_q_stride, bias_k_stride, bias_extent, head_mask_ptr,
        head_mask_q_stride, head_mask_k_stride, head_mask_extent, table_ptr, num_distances, D, BLOCK_D, BLOCK_N, CAUSAL,
        KEY_TERM, HAS_DROPOUT, PLAIN, PRECISION,
    )  # fmt: skip
    dv = tl.dot(tl.trans(w.to(dout.dtype)), dout, dv, input_precision=PRECISION)
    if table_ptr is not None and KEY_TERM:
        dk += relative_dk(ds, position_q, position_k, table_ptr, num_distances, D, BLOCK_D, PRECISION)
    dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=VARYING)
def _attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, order_ptr,
    coords_q_ptr, coords_k_ptr, seed_ptr, bias_ptr, head_mask_ptr, table_ptr, q_stride, q_head_stride, k_stride,
    k_head_stride, v_stride, v_head_stride, dout_stride, dout_head_stride, bias_row_stride, bias_head_stride,
    bias_q_stride, bias_k_stride, bias_extent, head_mask_row_stride, head_mask_head_stride, head_mask_q_stride,
    head_mask_k_stride, head_mask_extent, num_distances, num_tokens, num_blocks, num_heads, softmax_scale,
    dropout_scale, inverse_scale, drop_max, site, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, KEY_TERM: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_PLAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one head: all queries of their sequence, tile after tile, in order.

    PARTS: rows [A * D] of a token in the tensors that dk and dv lie in: 1 if of their own, 3 if one [T, 3, A, D].
    """
    block, head, sequence = locate(num_blocks, num_heads, order_ptr)
    start_k, num_keys = sequence_span(cu_seqlens_k_ptr, sequence)
    first_key = block * BLOCK_N
    if first_key >= num_keys:
        return
    start_q, num_queries = sequence_span(cu_seqlens_q_ptr, sequence)
    wide_head = head.to(tl.int64)
    scale_log2 = softmax_scale * LOG2E

    offs_n = first_key + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr + start_k * k_stride + wide_head * k_head_stride, k_stride, offs_n, num_keys, D, BLOCK_D, True)
    v = load_rows(v_ptr + start_k * v_stride + wide_head * v_head_stride, v_stride, offs_n, num_keys, D, BLOCK_D, True)
    q_ptr += start_q * q_stride + wide_head * q_head_stride
    dout_ptr += start_q * dout_stride + wide_head * dout_head_stride
    lse_ptr += wide_head * num_tokens + start_q
    delta_ptr += wide_head * num_tokens + start_q

    position_k, k0, k1 = None, None, None
    HAS_EXTRAS: tl.constexpr = bias_ptr is not None or head_mask_ptr is not None or table_ptr is not None
    if HAS_DROPOUT or CAUSAL or HAS_EXTRAS:
        coords_q_ptr += start_q * 2
    if CAUSAL or HAS_EXTRAS:
        coords_k_ptr += start_k * 2
        position_k = load_positions(coords_k_ptr, offs_n, num_keys)
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
    if HAS_EXTRAS:
        sequence_row = tl.load(coords_q_ptr, mask=num_queries > 0, other=0)
        if bias_ptr is not None:
            bias_ptr, bias_extent = factor_of(
                bias_ptr, bias_extent, sequence_row, wide_head, bias_row_stride, bias_head_stride
            )
        if head_mask_ptr is not None:
            head_mask_ptr, head_mask_extent = factor_of(
                head_mask_ptr, head_mask_extent, sequence_row, wide_head, head_mask_row_stride, head_mask_head_stride
            )

    # Keys past the sequence's end are zeros here and nothing reads their dk and dv: only queries make a tile plain.
    begin, plain_begin = 0, 0
    plain_end = num_queries // BLOCK_M * BLOCK_M
    if CAUSAL:  # noqa: SIM102 -- known when compiling; joined to the next it would not be
        # Exact where positions have no holes, else on the safe side: see `visible_keys`.
        if num_queries > 0:
            first_query_position = tl.load(coords_q_ptr + 1)
            last_query_position = tl.load(coords_q_ptr + (num_queries - 1) * 2 + 1)
            first_position = tl.load(coords_k_ptr + first_key * 2 + 1)
            last_key = tl.minimum(first_key + BLOCK_N, num_keys) - 1
            last_position = tl.load(coords_k_ptr + last_key * 2 + 1)
            begin = tl.maximum(first_position - last_query_position + num_queries - 1, 0) // BLOCK_M * BLOCK_M
            plain_begin = tl.cdiv(tl.maximum(last_position - first_query_position, 0), BLOCK_M) * BLOCK_M
            plain_end = tl.maximum(plain_end, plain_begin)
    if not HAS_PLAIN:
        plain_begin = num_queries
        plain_end = num_queries

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if CAUSAL or not HAS_PLAIN:
        for first_query in tl.range(begin, tl.minimum(plain_begin, num_queries), BLOCK_M, num_stages=1):
            dk, dv = _add_queries(
                dk, dv, k, v, offs_n, num_keys, q_ptr, dout_ptr, lse_ptr, delta_ptr, q_stride, dout_stride, first_query,
                num_queries, first_key, scale_log2, inverse_scale, coords_q_ptr, position_k, k0, k1, drop_max, site,
                head, bias_ptr, bias_q_stride, bias_k_stride, bias_extent, head_mask_ptr, head_mask_q_stride,
                head_mask_k_stride, head_mask_extent, table_ptr, num_distances, D, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL,
                KEY_TERM, HAS_DROPOUT, False, PRECISION,
            )  # fmt: skip
    if HAS_PLAIN:
        for first_query in tl.range(plain_begin, plain_end, BLOCK_M):
            dk, dv = _add_queries(
                dk, dv, k, v, offs_n, num_keys, q_ptr, dout_ptr, lse_ptr, delta_ptr, q_stride, dout_stride, first_query,
                num_queries, first_key, scale_log2, inverse_scale, coords_q_ptr, None, k0, k1, drop_max, site, head,
                None, 0, 0, 0, None, 0, 0, 0, None, 0, D, BLOCK_D, BLOCK_M, BLOCK_N, False, False, HAS_DROPOUT, True,
                PRECISION,
            )  # fmt: skip
        if plain_end < num_queries:
            dk, dv = _add_queries(
                dk, dv, k, v, offs_n, num_keys, q_ptr, dout_ptr, lse_ptr, delta_ptr, q_stride, dout_stride, plain_end,
                num_queries, first_key, scale_log2, inverse_scale, coords_q_ptr, position_k, k0, k1, drop_max, site,
                head, None, 0, 0, 0, None, 0, 0, 0, None, 0, D, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, False, HAS_DROPOUT,
                False, PRECISION,
            )  # fmt: skip
    offset = (start_k * num_heads * PARTS + wide_head) * D
    dk *= softmax_scale * dropout_scale
    rows, num_rows = offs_n * PARTS, num_keys * PARTS
    store_rows(dk_ptr + offset, num_heads * D, rows, num_rows, dk, D, BLOCK_D)
    store_rows(dv_ptr + offset, num_heads * D, rows, num_rows, dv * dropout_scale, D, BLOCK_D)
