"""Backward kernels of attention over tiles: dq by blocks of queries, dk and dv by blocks of keys; no atomics.

Both make P again from q, k and lse: 7 matrix products where one kernel with atomics on dq needs 5. With z = 1 / (1 - p)
of dropout and K the keep mask,

    dS = P * (z * (dout v^T * K) - delta) = z * (W * dout v^T - P * delta / z)        W = P * K

so the accumulators take the sums without z and softmax_scale, which multiply them once at the end.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bert_fast.kernels._attention import (
    LOG2E,
    VARYING,
    Bias,
    Drop,
    Extras,
    Keys,
    Table,
    bias_at,
    gradients_of_scores,
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
    q, k, v, dout, lse, delta, exists, first_key, scale_log2, batch_row, position_q, position_k, drop, extras,
    D: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(w, ds) [M, N] of one tile: W / z and dS / z, fp32. lse in base 2, delta already divided by z.

    exists (bool [M, N]): both tokens do.
    """
    if drop.k0 is not None:
        keep = keep_tile(drop, batch_row, position_q, first_key, k.shape[0])
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if not PLAIN:
        if extras.table.ptr is not None:
            scores += relative_scores(q, k, position_q, position_k, extras.table, D, PRECISION)
        scores = mask_scores(scores * scale_log2, exists, position_q, position_k, extras.bias, CAUSAL)
        p = tl.exp2(scores - lse[:, None])
    else:
        p = tl.exp2(scores * scale_log2 - lse[:, None])
    dw = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    w = p
    if drop.k0 is not None:
        w = tl.where(keep, w, 0.0)
    return w, gradients_of_scores(p, w, dw, delta, drop.k0 is not None)


@triton.jit
def _add_keys(
    dq, q, dout, lse, delta, offs_m, num_queries, keys, first_key, scale_log2, batch_row, position_q, drop, extras,
    D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of keys added to dq [M, BLOCK_D]."""
    BLOCK_D: tl.constexpr = q.shape[1]
    offs_n = first_key + tl.arange(0, BLOCK_N)
    k = load_rows(keys.k_ptr, keys.k_stride, offs_n, keys.num, D, BLOCK_D, not PLAIN)
    v = load_rows(keys.v_ptr, keys.v_stride, offs_n, keys.num, D, BLOCK_D, not PLAIN)
    exists = (offs_m < num_queries)[:, None] & (offs_n < keys.num)[None, :]
    position_k = None
    bias, table = extras
    if CAUSAL or bias.ptr is not None or table.ptr is not None:
        position_k = load_positions(keys.coords_ptr, offs_n, keys.num)
    _, ds = probabilities_and_gradients(
        q, k, v, dout, lse, delta, exists, first_key, scale_log2, batch_row, position_q, position_k, drop, extras, D,
        CAUSAL, PLAIN, PRECISION,
    )  # fmt: skip
    if table.ptr is not None:
        dq += relative_dq(ds, position_q, position_k, table, D, BLOCK_D, PRECISION)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=VARYING)
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, dq_ptr, lse_ptr, delta_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, order_ptr,
    coords_q_ptr, coords_k_ptr, seed_ptr, bias_ptr, table_ptr, q_stride, q_head_stride, k_stride, k_head_stride,
    v_stride, v_head_stride, dout_stride, dout_head_stride, bias_row_stride, bias_head_stride, bias_q_stride,
    bias_k_stride, bias_extent, num_distances, num_tokens, num_blocks, num_heads, softmax_scale, dropout_scale,
    inverse_scale, drop_max, site, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
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

    batch_row, position_q = None, None
    HAS_EXTRAS: tl.constexpr = bias_ptr is not None or table_ptr is not None
    if HAS_DROPOUT or CAUSAL or HAS_EXTRAS:
        coords_q_ptr += start_q * 2
        batch_row, position_q = load_names(coords_q_ptr, offs_m, num_queries)
    if CAUSAL or HAS_EXTRAS:
        coords_k_ptr += start_k * 2
    bias = Bias(bias_ptr, bias_q_stride, bias_k_stride, bias_extent)
    if HAS_EXTRAS:
        sequence_row = tl.load(coords_q_ptr)
        if bias_ptr is not None:
            bias = bias_at(bias, bias_row_stride, bias_head_stride, sequence_row, wide_head)
    extras = Extras(bias, Table(table_ptr, num_distances, KEY_TERM))
    keys = Keys(
        k_ptr + start_k * k_stride + wide_head * k_head_stride, v_ptr + start_k * v_stride + wide_head * v_head_stride,
        k_stride, v_stride, coords_k_ptr, num_keys,
    )  # fmt: skip
    k0, k1 = None, None
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
    drop = Drop(k0, k1, site, drop_max, head)
    plain = Extras(Bias(None, 0, 0, 0), Table(None, 0, False))

    end, num_plain = visible_keys(
        coords_q_ptr, coords_k_ptr, first_query, num_queries, num_keys, BLOCK_M, BLOCK_N, CAUSAL, HAS_PLAIN
    )
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_PLAIN:
        for first_key in tl.range(0, num_plain, BLOCK_N):
            dq = _add_keys(
                dq, q, dout, lse, delta, offs_m, num_queries, keys, first_key, scale_log2, batch_row, position_q, drop,
                plain, D, BLOCK_N, False, True, PRECISION,
            )  # fmt: skip
    for first_key in tl.range(num_plain, end, BLOCK_N, num_stages=1):
        dq = _add_keys(
            dq, q, dout, lse, delta, offs_m, num_queries, keys, first_key, scale_log2, batch_row, position_q, drop,
            extras, D, BLOCK_N, CAUSAL, False, PRECISION,
        )  # fmt: skip
    dq *= softmax_scale * dropout_scale
    dq_ptr += (start_q * num_heads * PARTS + wide_head) * D
    store_rows(dq_ptr, num_heads * D, offs_m * PARTS, num_queries * PARTS, dq, D, BLOCK_D)


class _Queries(NamedTuple):
    """One sequence's queries, of one head, and what backward knows of them."""

    q_ptr: Any
    dout_ptr: Any
    lse_ptr: Any
    delta_ptr: Any
    q_stride: Any
    dout_stride: Any
    coords_ptr: Any
    num: Any
    inverse_scale: Any  # 1 / z, for delta


@triton.jit
def _add_queries(
    dk, dv, k, v, offs_n, num_keys, queries, first_query, first_key, scale_log2, position_k, drop, extras,
    D: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of queries added to dk, dv [N, BLOCK_D]."""
    BLOCK_D: tl.constexpr = k.shape[1]
    offs_m = first_query + tl.arange(0, BLOCK_M)
    q = load_rows(queries.q_ptr, queries.q_stride, offs_m, queries.num, D, BLOCK_D, not PLAIN)
    dout = load_rows(queries.dout_ptr, queries.dout_stride, offs_m, queries.num, D, BLOCK_D, not PLAIN)
    lse = load_lse(queries.lse_ptr, offs_m, queries.num, not PLAIN)
    if PLAIN:
        delta = tl.load(queries.delta_ptr + offs_m) * queries.inverse_scale
    else:
        delta = tl.load(queries.delta_ptr + offs_m, mask=offs_m < queries.num, other=0.0) * queries.inverse_scale
    batch_row, position_q = None, None
    bias, table = extras
    if drop.k0 is not None or CAUSAL or bias.ptr is not None or table.ptr is not None:
        batch_row, position_q = load_names(queries.coords_ptr, offs_m, queries.num)
    exists = (offs_m < queries.num)[:, None] & (offs_n < num_keys)[None, :]
    w, ds = probabilities_and_gradients(
        q, k, v, dout, lse, delta, exists, first_key, scale_log2, batch_row, position_q, position_k, drop, extras, D,
        CAUSAL, PLAIN, PRECISION,
    )  # fmt: skip
    dv = tl.dot(tl.trans(w.to(dout.dtype)), dout, dv, input_precision=PRECISION)
    if table.ptr is not None and table.key_term:
        dk += relative_dk(ds, position_q, position_k, table, D, BLOCK_D, PRECISION)
    dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=VARYING)
def _attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, order_ptr,
    coords_q_ptr, coords_k_ptr, seed_ptr, bias_ptr, table_ptr, q_stride, q_head_stride, k_stride, k_head_stride,
    v_stride, v_head_stride, dout_stride, dout_head_stride, bias_row_stride, bias_head_stride, bias_q_stride,
    bias_k_stride, bias_extent, num_distances, num_tokens, num_blocks, num_heads, softmax_scale, dropout_scale,
    inverse_scale, drop_max, site, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
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
    statistics = wide_head * num_tokens + start_q

    position_k = None
    HAS_EXTRAS: tl.constexpr = bias_ptr is not None or table_ptr is not None
    if HAS_DROPOUT or CAUSAL or HAS_EXTRAS:
        coords_q_ptr += start_q * 2
    if CAUSAL or HAS_EXTRAS:
        coords_k_ptr += start_k * 2
        position_k = load_positions(coords_k_ptr, offs_n, num_keys)
    bias = Bias(bias_ptr, bias_q_stride, bias_k_stride, bias_extent)
    if HAS_EXTRAS:
        sequence_row = tl.load(coords_q_ptr, mask=num_queries > 0, other=0)
        if bias_ptr is not None:
            bias = bias_at(bias, bias_row_stride, bias_head_stride, sequence_row, wide_head)
    extras = Extras(bias, Table(table_ptr, num_distances, KEY_TERM))
    queries = _Queries(
        q_ptr + start_q * q_stride + wide_head * q_head_stride,
        dout_ptr + start_q * dout_stride + wide_head * dout_head_stride, lse_ptr + statistics, delta_ptr + statistics,
        q_stride, dout_stride, coords_q_ptr, num_queries, inverse_scale,
    )  # fmt: skip
    k0, k1 = None, None
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
    drop = Drop(k0, k1, site, drop_max, head)
    plain = Extras(Bias(None, 0, 0, 0), Table(None, 0, False))

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
                dk, dv, k, v, offs_n, num_keys, queries, first_query, first_key, scale_log2, position_k, drop, extras,
                D, BLOCK_M, CAUSAL, False, PRECISION,
            )  # fmt: skip
    if HAS_PLAIN:
        for first_query in tl.range(plain_begin, plain_end, BLOCK_M):
            dk, dv = _add_queries(
                dk, dv, k, v, offs_n, num_keys, queries, first_query, first_key, scale_log2, None, drop, plain,
                D, BLOCK_M, False, True, PRECISION,
            )  # fmt: skip
        if plain_end < num_queries:
            dk, dv = _add_queries(
                dk, dv, k, v, offs_n, num_keys, queries, plain_end, first_key, scale_log2, position_k, drop, extras,
                D, BLOCK_M, CAUSAL, False, PRECISION,
            )  # fmt: skip
    offset = (start_k * num_heads * PARTS + wide_head) * D
    dk *= softmax_scale * dropout_scale
    rows, num_rows = offs_n * PARTS, num_keys * PARTS
    store_rows(dk_ptr + offset, num_heads * D, rows, num_rows, dk, D, BLOCK_D)
    store_rows(dv_ptr + offset, num_heads * D, rows, num_rows, dv * dropout_scale, D, BLOCK_D)
