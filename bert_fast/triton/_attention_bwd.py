"""Backward kernels of attention over tiles: dq by blocks of queries, dk and dv by blocks of keys; no atomics.

Both make P again from q, k and lse: 7 matrix products where one kernel with atomics on dq needs 5. With z = 1 / (1 - p)
of dropout and K the keep mask,

    dS = P * (z * (dout v^T * K) - delta) = z * (W * dout v^T - P * delta / z)        W = P * K

so the accumulators take the sums without z and softmax_scale, which multiply them once at the end.

Short sequences: a program holds all queries of a head and makes everything from one P: 5 products, delta inside, dq
without a second kernel. Each input is read once.

Gradients of a bias and of tables of relative positions: every program owns a part of its result; no atomics.

    dbias = dS          dC[r] = sum of dS q over distance r          dP[r] = sum of dS k over distance r

dbias is summed over what the bias is broadcast along. P and dS are made again from q, k, v and lse, tile by tile, once
more for the bias and for the tables: they are rare, and nothing of size [B, A, Sq, Sk] need be kept for them. Where
programs would be few (a bias for all rows of the batch, tables), sequences are dealt out to several, which leave
partial sums in fp32 for a second stage.

A bias is looked up by positions, so its gradient is made in the order of positions: a tile's rows and columns are
neighbouring positions, `_ordinals_at` finds the tokens, and positions without one hold nothing. Along a broadcast
dimension tokens are taken as they come.

Precision: sums in fp32, rounded once. Determinism: the order of additions depends on the shapes and the number of
multiprocessors alone.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bert_fast.triton._attention import (
    _BLOCKS_PER_HEAD,
    LOG2E,
    VARYING,
    Bias,
    Drop,
    Extras,
    Keys,
    Table,
    add_table_gradient,
    bias_at,
    gradients_of_scores,
    keep_tile,
    load_lse,
    load_names,
    load_positions,
    load_rows,
    locate,
    mask_scores,
    relative_dk,
    relative_dq,
    relative_scores,
    sequence_span,
    store_rows,
    visible_keys,
)
from bert_fast.triton._math import philox4x32, split_seed


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
        if extras.relative_keys.ptr is not None or extras.relative_queries.ptr is not None:
            scores += relative_scores(q, k, position_q, position_k, extras, D, PRECISION)
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
    HAS_TABLES: tl.constexpr = extras.relative_keys.ptr is not None or extras.relative_queries.ptr is not None
    if CAUSAL or extras.bias.ptr is not None or HAS_TABLES:
        position_k = load_positions(keys.coords_ptr, offs_n, keys.num)
    _, ds = probabilities_and_gradients(
        q, k, v, dout, lse, delta, exists, first_key, scale_log2, batch_row, position_q, position_k, drop, extras, D,
        CAUSAL, PLAIN, PRECISION,
    )  # fmt: skip
    if extras.relative_keys.ptr is not None:
        dq += relative_dq(ds, position_q, position_k, extras.relative_keys, D, BLOCK_D, PRECISION)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=VARYING)
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, dq_ptr, lse_ptr, delta_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, order_ptr,
    coords_q_ptr, coords_k_ptr, seed_ptr, bias_ptr, relative_keys_ptr, relative_queries_ptr, q_stride, q_head_stride,
    k_stride, k_head_stride, v_stride, v_head_stride, dout_stride, dout_head_stride, bias_row_stride, bias_head_stride,
    bias_q_stride, bias_k_stride, bias_extent, num_distances, num_tokens, num_blocks, num_heads, softmax_scale,
    dropout_scale, inverse_scale, drop_max, site, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    HAS_PLAIN: tl.constexpr, PRECISION: tl.constexpr,
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
    HAS_EXTRAS: tl.constexpr = bias_ptr is not None or relative_keys_ptr is not None or relative_queries_ptr is not None
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
    extras = Extras(
        bias,
        Table(relative_keys_ptr, wide_head * D, num_heads * D, num_distances),
        Table(relative_queries_ptr, wide_head * D, num_heads * D, num_distances),
    )
    keys = Keys(
        k_ptr + start_k * k_stride + wide_head * k_head_stride, v_ptr + start_k * v_stride + wide_head * v_head_stride,
        k_stride, v_stride, coords_k_ptr, num_keys,
    )  # fmt: skip
    k0, k1 = None, None
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
    drop = Drop(k0, k1, site, drop_max, head)
    plain = Extras(Bias(None, 0, 0, 0), Table(None, 0, 0, 0), Table(None, 0, 0, 0))

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
    HAS_TABLES: tl.constexpr = extras.relative_keys.ptr is not None or extras.relative_queries.ptr is not None
    if drop.k0 is not None or CAUSAL or extras.bias.ptr is not None or HAS_TABLES:
        batch_row, position_q = load_names(queries.coords_ptr, offs_m, queries.num)
    exists = (offs_m < queries.num)[:, None] & (offs_n < num_keys)[None, :]
    w, ds = probabilities_and_gradients(
        q, k, v, dout, lse, delta, exists, first_key, scale_log2, batch_row, position_q, position_k, drop, extras, D,
        CAUSAL, PLAIN, PRECISION,
    )  # fmt: skip
    dv = tl.dot(tl.trans(w.to(dout.dtype)), dout, dv, input_precision=PRECISION)
    if extras.relative_queries.ptr is not None:
        dk += relative_dk(ds, position_q, position_k, extras.relative_queries, D, BLOCK_D, PRECISION)
    dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=VARYING)
def _attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, order_ptr,
    coords_q_ptr, coords_k_ptr, seed_ptr, bias_ptr, relative_keys_ptr, relative_queries_ptr, q_stride, q_head_stride,
    k_stride, k_head_stride, v_stride, v_head_stride, dout_stride, dout_head_stride, bias_row_stride, bias_head_stride,
    bias_q_stride, bias_k_stride, bias_extent, num_distances, num_tokens, num_blocks, num_heads, softmax_scale,
    dropout_scale, inverse_scale, drop_max, site, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    HAS_PLAIN: tl.constexpr, PRECISION: tl.constexpr,
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
    HAS_EXTRAS: tl.constexpr = bias_ptr is not None or relative_keys_ptr is not None or relative_queries_ptr is not None
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
    extras = Extras(
        bias,
        Table(relative_keys_ptr, wide_head * D, num_heads * D, num_distances),
        Table(relative_queries_ptr, wide_head * D, num_heads * D, num_distances),
    )
    queries = _Queries(
        q_ptr + start_q * q_stride + wide_head * q_head_stride,
        dout_ptr + start_q * dout_stride + wide_head * dout_head_stride, lse_ptr + statistics, delta_ptr + statistics,
        q_stride, dout_stride, coords_q_ptr, num_queries, inverse_scale,
    )  # fmt: skip
    k0, k1 = None, None
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
    drop = Drop(k0, k1, site, drop_max, head)
    plain = Extras(Bias(None, 0, 0, 0), Table(None, 0, 0, 0), Table(None, 0, 0, 0))

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


@triton.jit(do_not_specialize=["num_tokens", "drop_max", "site"])
def _attention_bwd_short_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    coords_q_ptr, coords_k_ptr, seed_ptr, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    dout_stride, dout_head_stride, num_tokens, num_heads, softmax_scale, dropout_scale, inverse_scale, drop_max, site,
    PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv of one head of one sequence, BLOCK_N keys at a time; keys that no query sees get zeros.

    PARTS: rows [A * D] of a token in the tensors that the gradients lie in: 1 if of their own, 3 if one [T, 3, A, D].
    """
    _, head, sequence = locate(1, num_heads, None)
    start_q, num_queries = sequence_span(cu_seqlens_q_ptr, sequence)
    start_k, num_keys = sequence_span(cu_seqlens_k_ptr, sequence)
    wide_head = head.to(tl.int64)
    scale_log2 = softmax_scale * LOG2E
    offs_m = tl.arange(0, BLOCK_M)
    q_ptr += start_q * q_stride + wide_head * q_head_stride
    k_ptr += start_k * k_stride + wide_head * k_head_stride
    v_ptr += start_k * v_stride + wide_head * v_head_stride
    dout_ptr += start_q * dout_stride + wide_head * dout_head_stride
    out_ptr += (start_q * num_heads + wide_head) * D  # contiguous
    dq_ptr += (start_q * num_heads * PARTS + wide_head) * D
    dk_ptr += (start_k * num_heads * PARTS + wide_head) * D
    dv_ptr += (start_k * num_heads * PARTS + wide_head) * D
    q = load_rows(q_ptr, q_stride, offs_m, num_queries, D, BLOCK_D, True)
    dout = load_rows(dout_ptr, dout_stride, offs_m, num_queries, D, BLOCK_D, True)
    out = load_rows(out_ptr, num_heads * D, offs_m, num_queries, D, BLOCK_D, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1) * inverse_scale  # [M]
    lse = load_lse(lse_ptr + wide_head * num_tokens + start_q, offs_m, num_queries, True)

    batch_row, position_q = None, None
    if HAS_DROPOUT or CAUSAL:
        batch_row, position_q = load_names(coords_q_ptr + start_q * 2, offs_m, num_queries)
    k0, k1 = None, None
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
    drop = Drop(k0, k1, site, drop_max, head)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first_key in tl.range(0, num_keys, BLOCK_N):
        offs_n = first_key + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, k_stride, offs_n, num_keys, D, BLOCK_D, True)
        v = load_rows(v_ptr, v_stride, offs_n, num_keys, D, BLOCK_D, True)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        position_k = None
        if CAUSAL:
            position_k = load_positions(coords_k_ptr + start_k * 2, offs_n, num_keys)
        scores = mask_scores(scores, (offs_n < num_keys)[None, :], position_q, position_k, Bias(None, 0, 0, 0), CAUSAL)
        p = tl.exp2(scores - lse[:, None])  # 0 for queries past the end: their lse is +inf
        dw = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        w = p
        if HAS_DROPOUT:
            keep = keep_tile(drop, batch_row, position_q, first_key, BLOCK_N)
            w = tl.where(keep, w, 0.0)
        ds = gradients_of_scores(p, w, dw, delta, HAS_DROPOUT).to(q.dtype)
        dv = tl.dot(tl.trans(w.to(dout.dtype)), dout, input_precision=PRECISION) * dropout_scale
        store_rows(dv_ptr, num_heads * D, offs_n * PARTS, num_keys * PARTS, dv, D, BLOCK_D)
        dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * (softmax_scale * dropout_scale)
        store_rows(dk_ptr, num_heads * D, offs_n * PARTS, num_keys * PARTS, dk, D, BLOCK_D)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    dq *= softmax_scale * dropout_scale
    store_rows(dq_ptr, num_heads * D, offs_m * PARTS, num_queries * PARTS, dq, D, BLOCK_D)


@triton.jit
def _ordinals_at(coords_ptr, positions, num_tokens):
    """Which token of a sequence stands at each position; num_tokens where none does.

    Positions ascend, so the one searched for is bounded by what precedes and what follows it: exactly where there are
    no holes, and then nothing is left to halve.
    """
    has_tokens = num_tokens > 0
    first = tl.load(coords_ptr + 1, mask=has_tokens, other=0)
    last = tl.load(coords_ptr + (num_tokens - 1) * 2 + 1, mask=has_tokens, other=0)
    low = tl.maximum(positions - last + num_tokens - 1, 0)
    high = tl.minimum(positions - first, num_tokens - 1)
    while tl.max(high - low, 0) > 0:
        middle = low + (high - low) // 2
        is_open = low < high
        is_below = tl.load(coords_ptr + middle * 2 + 1, mask=is_open, other=0) < positions
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
    found = tl.load(coords_ptr + low * 2 + 1, mask=low < num_tokens, other=-1)
    return tl.where(found == positions, low, num_tokens)


@triton.jit
def _tokens(coords_ptr, num_tokens, step, first_position, BLOCK: tl.constexpr, BY_POSITION: tl.constexpr):
    """(ordinals, positions) of a tile's side: at the positions from first_position on, or the step-th BLOCK tokens."""
    offs = tl.arange(0, BLOCK)
    if BY_POSITION:
        positions = first_position + offs
        return _ordinals_at(coords_ptr, positions, num_tokens), positions.to(tl.uint32)
    else:
        ordinals = step * BLOCK + offs
        _, positions = load_names(coords_ptr, ordinals, num_tokens)
        return ordinals, positions


@triton.jit
def _num_steps(coords_ptr, num_tokens, first_position, BLOCK: tl.constexpr, BY_POSITION: tl.constexpr):
    """How many tiles a side has: 1 or, where no token stands there, 0 by position."""
    if BY_POSITION:
        ordinals = _ordinals_at(coords_ptr, first_position + tl.arange(0, BLOCK), num_tokens)
        return (tl.min(ordinals, 0) < num_tokens).to(tl.int32)
    else:
        return tl.cdiv(num_tokens, BLOCK)


@triton.jit
def _keep_at(drop, batch_row, position, ordinal_k):
    """`keep_tile` of keys anywhere, ordinal_k [N]: a Philox call an element, of which it takes one of 8 values."""
    block = drop.head * _BLOCKS_PER_HEAD + ordinal_k // 32 * 4 + ordinal_k % 8 // 2
    w0, w1, w2, w3 = philox4x32(
        block.to(tl.uint32)[None, :], position[:, None], batch_row.to(tl.uint32), drop.site.to(tl.uint32), drop.k0,
        drop.k1,
    )  # fmt: skip
    word = (ordinal_k % 32 // 8)[None, :]
    bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return tl.where((ordinal_k % 2 == 0)[None, :], bits << 16, bits) > drop.drop_max.to(tl.uint32)


@triton.jit
def _tile_gradient(
    q, k, v, dout, lse, delta, exists, row, position_q, position_k, ordinal_k, scale_log2, drop, extras,
    D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the bias by a tile of scores, divided by z, fp32 [M, N]; lse and delta as in dq."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if extras.relative_keys.ptr is not None or extras.relative_queries.ptr is not None:
        scores += relative_scores(q, k, position_q, position_k, extras, D, PRECISION)
    scores = mask_scores(scores * scale_log2, exists, position_q, position_k, extras.bias, CAUSAL)
    p = tl.exp2(scores - lse[:, None])
    dw = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    if drop.k0 is not None:
        dw = tl.where(_keep_at(drop, row, position_q, ordinal_k), dw, 0.0)
    return p * (dw - delta[:, None])


@triton.jit(
    do_not_specialize=[*VARYING, "num_sequences", "num_shares", "size_q", "size_k", "num_tiles_q", "num_tiles_k"]
)
def _attention_bwd_bias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dbias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, coords_q_ptr,
    coords_k_ptr, seed_ptr, bias_ptr, relative_keys_ptr, relative_queries_ptr, q_stride, q_head_stride, k_stride,
    k_head_stride, v_stride, v_head_stride, dout_stride, dout_head_stride, bias_row_stride, bias_head_stride,
    bias_q_stride, bias_k_stride, bias_extent, num_distances, num_tokens, num_heads, num_sequences, num_shares, size_q,
    size_k, num_tiles_q, num_tiles_k, softmax_scale, dropout_scale, inverse_scale, drop_max, site, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_HEADS: tl.constexpr,
    HAS_QUERIES: tl.constexpr, HAS_KEYS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of the bias: dbias [rows or shares, heads, size_q, size_k].

    HAS_ROWS, HAS_HEADS, HAS_QUERIES, HAS_KEYS: the tensor's dimensions that are not broadcast. With rows, `part` is
    this program's row, whose sequences it looks for, SEQUENCES at once; without, it sums every num_shares-th sequence.
    """
    tile_k = tl.program_id(0) % num_tiles_k
    tile_q = tl.program_id(0) // num_tiles_k % num_tiles_q
    plane = tl.program_id(0) // num_tiles_k // num_tiles_q
    part = plane
    first_head, end_head = 0, num_heads
    if HAS_HEADS:
        part = plane // num_heads
        first_head = plane % num_heads
        end_head = first_head + 1
    k0, k1 = None, None
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_sequence in tl.range(0, num_sequences, SEQUENCES, num_stages=1):
        sequences = first_sequence + tl.arange(0, SEQUENCES)
        in_batch = sequences < num_sequences
        starts = tl.load(cu_seqlens_q_ptr + sequences, mask=in_batch, other=0)
        chosen = tl.load(cu_seqlens_q_ptr + sequences + 1, mask=in_batch, other=0) > starts
        if HAS_ROWS:
            rows = tl.load(coords_q_ptr + starts.to(tl.int64) * 2, mask=chosen, other=-1)
            chosen = chosen & (rows == part)
        else:
            chosen = chosen & (sequences % num_shares == part)
        for _ in tl.range(0, tl.sum(chosen.to(tl.int32), 0), num_stages=1):
            sequence = tl.min(tl.where(chosen, sequences, num_sequences), 0)
            chosen = chosen & (sequences != sequence)
            start_q, num_queries = sequence_span(cu_seqlens_q_ptr, sequence)
            start_k, num_keys = sequence_span(cu_seqlens_k_ptr, sequence)
            names_q = coords_q_ptr + start_q * 2
            names_k = coords_k_ptr + start_k * 2
            row = tl.load(names_q)
            steps_q = _num_steps(names_q, num_queries, tile_q * BLOCK_M, BLOCK_M, HAS_QUERIES)
            steps_k = _num_steps(names_k, num_keys, tile_k * BLOCK_N, BLOCK_N, HAS_KEYS)
            for head in tl.range(first_head, end_head, num_stages=1):
                wide_head = tl.cast(head, tl.int64)
                bias = Bias(bias_ptr, bias_q_stride, bias_k_stride, bias_extent)
                bias = bias_at(bias, bias_row_stride, bias_head_stride, row, wide_head)
                extras = Extras(
                    bias,
                    Table(relative_keys_ptr, wide_head * D, num_heads * D, num_distances),
                    Table(relative_queries_ptr, wide_head * D, num_heads * D, num_distances),
                )
                drop = Drop(k0, k1, site, drop_max, head)
                q_of = q_ptr + start_q * q_stride + wide_head * q_head_stride
                k_of = k_ptr + start_k * k_stride + wide_head * k_head_stride
                v_of = v_ptr + start_k * v_stride + wide_head * v_head_stride
                dout_of = dout_ptr + start_q * dout_stride + wide_head * dout_head_stride
                statistics = wide_head * num_tokens + start_q
                for step_q in tl.range(0, steps_q, num_stages=1):
                    offs_q, position_q = _tokens(names_q, num_queries, step_q, tile_q * BLOCK_M, BLOCK_M, HAS_QUERIES)
                    q = load_rows(q_of, q_stride, offs_q, num_queries, D, BLOCK_D, True)
                    dout = load_rows(dout_of, dout_stride, offs_q, num_queries, D, BLOCK_D, True)
                    lse = load_lse(lse_ptr + statistics, offs_q, num_queries, True)
                    delta = tl.load(delta_ptr + statistics + offs_q, mask=offs_q < num_queries, other=0.0)
                    for step_k in tl.range(0, steps_k, num_stages=1):
                        offs_k, position_k = _tokens(names_k, num_keys, step_k, tile_k * BLOCK_N, BLOCK_N, HAS_KEYS)
                        k = load_rows(k_of, k_stride, offs_k, num_keys, D, BLOCK_D, True)
                        v = load_rows(v_of, v_stride, offs_k, num_keys, D, BLOCK_D, True)
                        exists = (offs_q < num_queries)[:, None] & (offs_k < num_keys)[None, :]
                        acc += _tile_gradient(
                            q, k, v, dout, lse, delta * inverse_scale, exists, row, position_q, position_k, offs_k,
                            softmax_scale * LOG2E, drop, extras, D, CAUSAL, PRECISION,
                        )  # fmt: skip
    acc *= dropout_scale
    if not HAS_QUERIES:
        acc = tl.broadcast_to(tl.sum(acc, 0)[None, :], acc.shape)
    if not HAS_KEYS:
        acc = tl.broadcast_to(tl.sum(acc, 1)[:, None], acc.shape)
    offs_m = tile_q * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_k * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = (plane.to(tl.int64) * size_q + offs_m[:, None]) * size_k + offs_n[None, :]
    mask = (offs_m < size_q)[:, None] & (offs_n < size_k)[None, :]
    tl.store(dbias_ptr + offsets, acc.to(dbias_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=[*VARYING, "num_sequences", "num_shares", "num_windows"])
def _attention_bwd_table_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dkeys_ptr, dqueries_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    coords_q_ptr, coords_k_ptr, seed_ptr, bias_ptr, relative_keys_ptr, relative_queries_ptr, q_stride, q_head_stride,
    k_stride, k_head_stride, v_stride, v_head_stride, dout_stride, dout_head_stride, bias_row_stride, bias_head_stride,
    bias_q_stride, bias_k_stride, bias_extent, num_distances, num_tokens, num_heads, num_sequences, num_shares,
    num_windows, softmax_scale, dropout_scale, inverse_scale, drop_max, site, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """WIDTH neighbouring rows of one head of one share of the gradients of tables, each where its pointer is not None.

    dkeys_ptr, dqueries_ptr (fp32 [num_shares, num_distances, A, D]): of relative_keys and relative_queries. A share is
    every num_shares-th sequence. Of their tiles only those are made that hold some of the WIDTH distances.
    """
    window = tl.program_id(0) % num_windows
    head = tl.program_id(0) // num_windows % num_heads
    share = tl.program_id(0) // num_windows // num_heads
    wide_head = head.to(tl.int64)
    first_row = window * WIDTH
    first_distance = first_row - (num_distances - 1) // 2
    scale_log2 = softmax_scale * LOG2E
    k0, k1 = None, None
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
    dkeys = tl.zeros([WIDTH, BLOCK_D], tl.float32)
    dqueries = tl.zeros([WIDTH, BLOCK_D], tl.float32)
    for sequence in tl.range(share, num_sequences, num_shares, num_stages=1):
        start_q, num_queries = sequence_span(cu_seqlens_q_ptr, sequence)
        start_k, num_keys = sequence_span(cu_seqlens_k_ptr, sequence)
        names_q = coords_q_ptr + start_q * 2
        names_k = coords_k_ptr + start_k * 2
        first_key_position = tl.load(names_k + 1, mask=num_keys > 0, other=0)
        last_key_position = tl.load(names_k + (num_keys - 1) * 2 + 1, mask=num_keys > 0, other=0)
        sequence_row = tl.load(names_q, mask=num_queries > 0, other=0)
        bias = Bias(bias_ptr, bias_q_stride, bias_k_stride, bias_extent)
        if bias_ptr is not None:
            bias = bias_at(bias, bias_row_stride, bias_head_stride, sequence_row, wide_head)
        extras = Extras(
            bias,
            Table(relative_keys_ptr, wide_head * D, num_heads * D, num_distances),
            Table(relative_queries_ptr, wide_head * D, num_heads * D, num_distances),
        )
        drop = Drop(k0, k1, site, drop_max, head)
        q_of = q_ptr + start_q * q_stride + wide_head * q_head_stride
        k_of = k_ptr + start_k * k_stride + wide_head * k_head_stride
        v_of = v_ptr + start_k * v_stride + wide_head * v_head_stride
        dout_of = dout_ptr + start_q * dout_stride + wide_head * dout_head_stride
        statistics = wide_head * num_tokens + start_q
        for first_query in tl.range(0, num_queries, BLOCK_M, num_stages=1):
            offs_m = first_query + tl.arange(0, BLOCK_M)
            batch_row, position_q = load_names(names_q, offs_m, num_queries)
            q = load_rows(q_of, q_stride, offs_m, num_queries, D, BLOCK_D, True)
            dout = load_rows(dout_of, dout_stride, offs_m, num_queries, D, BLOCK_D, True)
            lse = load_lse(lse_ptr + statistics, offs_m, num_queries, True)
            delta = tl.load(delta_ptr + statistics + offs_m, mask=offs_m < num_queries, other=0.0) * inverse_scale
            # Keys at these distances stand between two positions: which tokens, as in `_attention.visible_keys`.
            nearest = tl.load(names_q + first_query * 2 + 1) - first_distance - (WIDTH - 1)
            farthest = tl.max(position_q.to(tl.int32), 0) - first_distance
            begin = tl.maximum(nearest - last_key_position + num_keys - 1, 0) // BLOCK_N * BLOCK_N
            end = tl.minimum(farthest - first_key_position + 1, num_keys)
            for first_key in tl.range(begin, end, BLOCK_N, num_stages=1):
                offs_n = first_key + tl.arange(0, BLOCK_N)
                position_k = load_positions(names_k, offs_n, num_keys)
                k = load_rows(k_of, k_stride, offs_n, num_keys, D, BLOCK_D, True)
                v = load_rows(v_of, v_stride, offs_n, num_keys, D, BLOCK_D, True)
                exists = (offs_m < num_queries)[:, None] & (offs_n < num_keys)[None, :]
                _, ds = probabilities_and_gradients(
                    q, k, v, dout, lse, delta, exists, first_key, scale_log2, batch_row, position_q, position_k, drop,
                    extras, D, CAUSAL, False, PRECISION,
                )  # fmt: skip
                if dkeys_ptr is not None:
                    dkeys = add_table_gradient(dkeys, ds, q, position_q, position_k, first_distance, 1, PRECISION)
                if dqueries_ptr is not None:
                    dqueries = add_table_gradient(
                        dqueries, tl.trans(ds), k, position_k, position_q, first_distance, -1, PRECISION
                    )
    rows = first_row + tl.arange(0, WIDTH)
    cols = tl.arange(0, BLOCK_D)
    offsets = ((share.to(tl.int64) * num_distances + rows[:, None]) * num_heads + head) * D + cols[None, :]
    mask = (rows < num_distances)[:, None] & (cols < D)[None, :]
    if dkeys_ptr is not None:
        tl.store(dkeys_ptr + offsets, dkeys * (softmax_scale * dropout_scale), mask=mask)
    if dqueries_ptr is not None:
        tl.store(dqueries_ptr + offsets, dqueries * (softmax_scale * dropout_scale), mask=mask)
