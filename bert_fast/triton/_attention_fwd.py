"""Forward kernels of attention.

Long sequences: over tiles of keys, with online softmax (Milakov & Gimelshein, arXiv:1805.02867). Short ones: a program
holds a whole head, queries and keys, in one tile; softmax takes one pass, and each input is read once.
"""

import triton
import triton.language as tl

from bert_fast.triton._attention import (
    LOG2E,
    VARYING,
    Bias,
    Drop,
    Extras,
    Keys,
    Table,
    bias_at,
    dropped,
    keep_tile,
    load_names,
    load_positions,
    load_rows,
    locate,
    mask_scores,
    relative_scores,
    sequence_span,
    store_rows,
    visible_keys,
)
from bert_fast.triton._math import split_seed


@triton.jit
def _add_keys(
    acc, m_i, l_i, q, keys, first_key, scale_log2, batch_row, position_q, drop, extras, D: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the new accumulator [M, D], running maximum (base 2) and sum of exponentials [M]."""
    BLOCK_D: tl.constexpr = q.shape[1]
    offs_n = first_key + tl.arange(0, BLOCK_N)
    k = load_rows(keys.k_ptr, keys.k_stride, offs_n, keys.num, D, BLOCK_D, not PLAIN)  # [N, D]
    if drop.k0 is not None:
        keep = keep_tile(drop, batch_row, position_q, first_key, BLOCK_N)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
    position_k = None
    exists = (offs_n < keys.num)[None, :]
    if PLAIN:
        m_new = tl.maximum(m_i, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
    else:
        HAS_TABLES: tl.constexpr = extras.relative_keys.ptr is not None or extras.relative_queries.ptr is not None
        if CAUSAL or extras.bias.ptr is not None or HAS_TABLES:
            position_k = load_positions(keys.coords_ptr, offs_n, keys.num)
        if HAS_TABLES:
            scores += relative_scores(q, k, position_q, position_k, extras, D, PRECISION)
        scores = mask_scores(scores * scale_log2, exists, position_q, position_k, extras.bias, CAUSAL)
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key so far: exp2(-inf - 0) = 0
        p = tl.exp2(scores - m_finite[:, None])
        alpha = tl.exp2(m_i - m_finite)
    l_i = l_i * alpha + tl.sum(p, 1)
    if drop.k0 is not None:
        p = dropped(p, keep, scale_log2)
    v = load_rows(keys.v_ptr, keys.v_stride, offs_n, keys.num, D, BLOCK_D, not PLAIN)  # [N, D]
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, l_i


@triton.jit(do_not_specialize=VARYING)
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, order_ptr, coords_q_ptr, coords_k_ptr,
    seed_ptr, bias_ptr, relative_keys_ptr, relative_queries_ptr, q_stride, q_head_stride, k_stride, k_head_stride,
    v_stride, v_head_stride, bias_row_stride, bias_head_stride, bias_q_stride, bias_k_stride, bias_extent,
    num_distances, num_tokens, num_blocks, num_heads, softmax_scale, dropout_scale, drop_max, site, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_PLAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head against all keys of their sequence. HAS_PLAIN: full tiles are plain ones."""
    block, head, sequence = locate(num_blocks, num_heads, order_ptr)
    start_q, num_queries = sequence_span(cu_seqlens_q_ptr, sequence)
    first_query = block * BLOCK_M
    if first_query >= num_queries:
        return
    start_k, num_keys = sequence_span(cu_seqlens_k_ptr, sequence)
    wide_head = head.to(tl.int64)
    scale_log2 = softmax_scale * LOG2E

    offs_m = first_query + tl.arange(0, BLOCK_M)
    q_ptr += start_q * q_stride + wide_head * q_head_stride
    q = load_rows(q_ptr, q_stride, offs_m, num_queries, D, BLOCK_D, True)  # [M, D]

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
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_PLAIN:
        for first_key in tl.range(0, num_plain, BLOCK_N):
            acc, m_i, l_i = _add_keys(
                acc, m_i, l_i, q, keys, first_key, scale_log2, batch_row, position_q, drop, plain, D, BLOCK_N,
                False, True, PRECISION,
            )  # fmt: skip
    for first_key in tl.range(num_plain, end, BLOCK_N, num_stages=1):
        acc, m_i, l_i = _add_keys(
            acc, m_i, l_i, q, keys, first_key, scale_log2, batch_row, position_q, drop, extras, D, BLOCK_N, CAUSAL,
            False, PRECISION,
        )  # fmt: skip

    # A query without keys: acc = 0, l_i = 0; its output is 0 and its lse -inf.
    acc *= (dropout_scale / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(l_i)) / LOG2E)
    store_rows(out_ptr + (start_q * num_heads + wide_head) * D, num_heads * D, offs_m, num_queries, acc, D, BLOCK_D)
    tl.store(lse_ptr + wide_head * num_tokens + start_q + offs_m, lse, mask=offs_m < num_queries)


@triton.jit(do_not_specialize=["num_tokens", "drop_max", "site"])
def _attention_fwd_short_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, coords_q_ptr, coords_k_ptr, seed_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, num_tokens, num_heads, softmax_scale,
    dropout_scale, drop_max, site, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of one sequence of at most BLOCK_M queries and BLOCK_N keys."""
    _, head, sequence = locate(1, num_heads, None)
    start_q, num_queries = sequence_span(cu_seqlens_q_ptr, sequence)
    if num_queries == 0:
        return
    start_k, num_keys = sequence_span(cu_seqlens_k_ptr, sequence)
    wide_head = head.to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    q_ptr += start_q * q_stride + wide_head * q_head_stride
    k_ptr += start_k * k_stride + wide_head * k_head_stride
    v_ptr += start_k * v_stride + wide_head * v_head_stride
    q = load_rows(q_ptr, q_stride, offs_m, num_queries, D, BLOCK_D, True)
    k = load_rows(k_ptr, k_stride, offs_n, num_keys, D, BLOCK_D, True)
    v = load_rows(v_ptr, v_stride, offs_n, num_keys, D, BLOCK_D, True)

    batch_row, position_q, position_k = None, None, None
    if HAS_DROPOUT or CAUSAL:
        batch_row, position_q = load_names(coords_q_ptr + start_q * 2, offs_m, num_queries)
    if CAUSAL:
        position_k = load_positions(coords_k_ptr + start_k * 2, offs_n, num_keys)

    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (softmax_scale * LOG2E)
    scores = mask_scores(scores, (offs_n < num_keys)[None, :], position_q, position_k, Bias(None, 0, 0, 0), CAUSAL)
    m = tl.max(scores, 1)
    m = tl.where(m == float("-inf"), 0.0, m)
    p = tl.exp2(scores - m[:, None])
    total = tl.sum(p, 1)
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
        drop = Drop(k0, k1, site, drop_max, head)
        p = dropped(p, keep_tile(drop, batch_row, position_q, 0, BLOCK_N), softmax_scale)
    out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    # A query without keys: out = 0, total = 0; its output is 0 and its lse -inf.
    out *= (dropout_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    lse = tl.where(total == 0.0, float("-inf"), (m + tl.log2(total)) / LOG2E)
    store_rows(out_ptr + (start_q * num_heads + wide_head) * D, num_heads * D, offs_m, num_queries, out, D, BLOCK_D)
    tl.store(lse_ptr + wide_head * num_tokens + start_q + offs_m, lse, mask=offs_m < num_queries)
