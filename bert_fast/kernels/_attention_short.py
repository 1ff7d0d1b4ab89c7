"""Attention of short sequences: a program holds a whole head, queries and keys, in one tile.

Softmax takes one pass, backward makes everything from one P: 5 products, delta inside, dq without a second kernel. Each
input is read once.
"""

import triton
import triton.language as tl

from bert_fast.kernels._attention import (
    LOG2E,
    Bias,
    Drop,
    dropped,
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
)
from bert_fast.kernels._math import split_seed

__all__ = ["_attention_bwd_short_kernel", "_attention_fwd_short_kernel"]


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
