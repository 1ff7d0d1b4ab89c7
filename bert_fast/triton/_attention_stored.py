"""Kernels of attention over tiles whose dropout mask forward stores and backward reads: sm_90, half precision.

They do what those of `_attention_fwd.py` and `_attention_bwd.py` do over tiles, without biases and relative positions,
and have their bits; but a mask is drawn once. docs/decisions/0006-attention-dropout.md says where they run and why.

words (int32 [A, strips, num_words]): the mask, a bit for each query, head and key, see
`reference.attention.stored_mask_shape` for its strips and `_draw_and_store` for its words.
"""

import triton
import triton.language as tl

from bert_fast.env import SETTINGS
from bert_fast.triton._attention import (
    _BLOCKS_PER_HEAD,
    LOG2E,
    Bias,
    Drop,
    Keys,
    gradients_of_scores,
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
from bert_fast.triton._attention_bwd import _Queries
from bert_fast.triton._math import philox4x32, split_seed

_HAS_NO_ASSEMBLER = tl.constexpr(SETTINGS.triton_interpret)
_VARYING = ["num_tokens", "num_strips", "num_words", "num_blocks", "drop_max", "site"]  # as `_attention.VARYING`


@triton.jit
def _words_at(words, num_words, first_query, first_key, BLOCK_M: tl.constexpr):
    """Where the words of a tile's queries and 64 keys lie: [warp, r, j] as one dimension, 128 bytes a warp."""
    lanes = tl.arange(0, BLOCK_M * 2)
    return words + (first_query // 16 + lanes // 32) * num_words + first_key // 64 * 32 + lanes % 32


@triton.jit
def _are_there(first_query, num_queries, BLOCK_M: tl.constexpr):
    """Which of these words belong to the sequence: those of 16 queries that begin in it."""
    return first_query + tl.arange(0, BLOCK_M * 2) // 32 * 16 < num_queries


@triton.jit
def _kept_halves(words, drop_max):
    """0xFFFF for each half of a word that is kept, else 0: two comparisons in two instructions.

    v >= t iff the smaller of v and t - 1 is not v. As numbers of half precision these are unequal where their bits are:
    t - 1 is neither 0, which equals -0, nor one that stands for no number (`_attention_tiles.STORED_THRESHOLDS`).
    """
    if _HAS_NO_ASSEMBLER:
        lower = tl.where((words << 16) > drop_max, 0xFFFF, 0).to(tl.uint32)
        return lower | tl.where(words > drop_max, 0xFFFF0000, 0).to(tl.uint32)
    else:
        most = (drop_max & 0xFFFF0000) | (drop_max >> 16)
        smaller = tl.inline_asm_elementwise(
            "min.u16x2 $0, $1, $2;", "=r,r,r", [words, most], dtype=tl.uint32, is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            "set.neu.u32.f16x2 $0, $1, $2;", "=r,r,r", [smaller, words], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def _draw_halves(column, position, batch_row, drop):
    """`_kept_halves` of the four words of Philox blocks."""
    w0, w1, w2, w3 = philox4x32(column, position, batch_row, drop.site.to(tl.uint32), drop.k0, drop.k1)
    most = drop.drop_max.to(tl.uint32)
    return _kept_halves(w0, most), _kept_halves(w1, most), _kept_halves(w2, most), _kept_halves(w3, most)


@triton.jit
def _gathered(m0, m1, m2, m3, FIRST: tl.constexpr):
    """Bit FIRST + i of either half: that of m_i."""
    ONES: tl.constexpr = 0x00010001 << FIRST
    return (m0 & ONES) | (m1 & (ONES << 1)) | (m2 & (ONES << 2)) | (m3 & (ONES << 3))


@triton.jit
def _draw_and_store(
    words, num_words, drop, batch_row, position, first_query, num_queries, first_key, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The mask of `_attention.keep_tile` for `_zeroed`, which it also stores for `_stored_tile`. BLOCK_N: 64.

    A thread holds 32 scores of a tile of 16 queries by 64 keys, with h, i, r and j as in `keep_tile`, g the group of 32
    keys and e the half of a word. Their bits are one word, bit 16e + 8g + 4h + i. Words are made before they are joined
    to a tile, of which a thread then holds the same scores: nothing moves between threads.

    Returns: uint32 [BLOCK_M, BLOCK_N], in whose half e an element at an e of its own finds 0xFFFF where it is kept.
    """
    tl.static_assert(BLOCK_N == 64)
    BLOCK_M: tl.constexpr = position.shape[0]
    p0, p1 = _halves_of_strips(position)
    r0, r1 = _halves_of_strips(batch_row)
    column = (drop.head * _BLOCKS_PER_HEAD + first_key // 8).to(tl.uint32)
    column = column + tl.reshape(tl.arange(0, 4), [1, 1, 4]).to(tl.uint32)
    a0, a1, a2, a3 = _draw_halves(column, p0, r0, drop)  # of h = 0, g = 0
    b0, b1, b2, b3 = _draw_halves(column, p1, r1, drop)
    c0, c1, c2, c3 = _draw_halves(column + 4, p0, r0, drop)
    d0, d1, d2, d3 = _draw_halves(column + 4, p1, r1, drop)
    bits = _gathered(a0, a1, a2, a3, 0) | _gathered(b0, b1, b2, b3, 4)
    bits = bits | _gathered(c0, c1, c2, c3, 8) | _gathered(d0, d1, d2, d3, 12)
    bits = tl.reshape(bits, [BLOCK_M * 2]).to(tl.int32, bitcast=True)
    is_there = _are_there(first_query, num_queries, BLOCK_M)
    tl.store(_words_at(words, num_words, first_query, first_key, BLOCK_M), bits, mask=is_there)
    m0 = tl.join(tl.join(a0, b0), tl.join(c0, d0))
    m1 = tl.join(tl.join(a1, b1), tl.join(c1, d1))
    m2 = tl.join(tl.join(a2, b2), tl.join(c2, d2))
    m3 = tl.join(tl.join(a3, b3), tl.join(c3, d3))
    kept = tl.join(tl.join(m0, m2), tl.join(m1, m3))
    kept = tl.permute(tl.join(kept, kept), [0, 3, 1, 4, 5, 6, 2, 7])  # [warp, h, r, g, i, i, j, e]
    return tl.reshape(kept, [BLOCK_M, BLOCK_N])


@triton.jit
def _halves_of_strips(x):
    """[M] as two tensors [warp, r, 1], one for each h."""
    x0, x1 = tl.split(tl.permute(tl.reshape(x, [x.shape[0] // 16, 2, 8]), [0, 2, 1]))
    return x0[:, :, None], x1[:, :, None]


@triton.jit
def _zeroed(p, kept):
    """p [M, N], of half precision, where it is kept by `_draw_and_store`, else 0."""
    if _HAS_NO_ASSEMBLER:
        is_upper = (tl.arange(0, p.shape[1]) % 2 != 0)[None, :]
        return tl.where(tl.where(is_upper, kept >> 16, kept & 0xFFFF) != 0, p, 0.0)
    else:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r,r", [p, kept], dtype=p.dtype, is_pure=True, pack=2
        )


@triton.jit
def _stored_tile(
    words, num_words, first_query, num_queries, first_key, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """bool [BLOCK_M, BLOCK_N], True where `_draw_and_store` kept. BLOCK_N: 64 or 32. CHECKED: not all queries exist."""
    GROUPS: tl.constexpr = BLOCK_N // 32
    at = _words_at(words, num_words, first_query, first_key, BLOCK_M)
    if CHECKED:
        bits = tl.load(at, mask=_are_there(first_query, num_queries, BLOCK_M), other=0)
    else:
        bits = tl.load(at)
    if GROUPS == 1:
        bits = bits >> (first_key % 64 // 32 * 8)
    bits = tl.reshape(bits, [1, 1, BLOCK_M // 16, 8, 1, 4, 1])
    h = tl.reshape(tl.arange(0, 2), [2, 1, 1, 1, 1, 1, 1])
    g = tl.reshape(tl.arange(0, GROUPS), [1, GROUPS, 1, 1, 1, 1, 1])
    i = tl.reshape(tl.arange(0, 4), [1, 1, 1, 1, 4, 1, 1])
    e = tl.reshape(tl.arange(0, 2), [1, 1, 1, 1, 1, 1, 2])
    keep = ((bits >> (16 * e + 8 * g + 4 * h + i)) & 1) != 0  # [h, g, warp, r, i, j, e]
    return tl.reshape(tl.permute(keep, [2, 0, 3, 1, 4, 5, 6]), [BLOCK_M, BLOCK_N])


@triton.jit
def _add_keys(
    acc, m_i, l_i, q, first_query, num_queries, keys, first_key, scale_log2, batch_row, position_q, drop, words,
    num_words, D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the new accumulator [M, D], running maximum (base 2) and sum of exponentials [M]."""
    BLOCK_D: tl.constexpr = q.shape[1]
    offs_n = first_key + tl.arange(0, BLOCK_N)
    k = load_rows(keys.k_ptr, keys.k_stride, offs_n, keys.num, D, BLOCK_D, not PLAIN)  # [N, D]
    kept = _draw_and_store(words, num_words, drop, batch_row, position_q, first_query, num_queries, first_key, BLOCK_N)
    scores = tl.dot(q, tl.trans(k))  # [M, N]
    if PLAIN:
        m_new = tl.maximum(m_i, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
    else:
        position_k = None
        if CAUSAL:
            position_k = load_positions(keys.coords_ptr, offs_n, keys.num)
        exists = (offs_n < keys.num)[None, :]
        scores = mask_scores(scores * scale_log2, exists, position_q, position_k, Bias(None, 0, 0, 0), CAUSAL)
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key so far: exp2(-inf - 0) = 0
        p = tl.exp2(scores - m_finite[:, None])
        alpha = tl.exp2(m_i - m_finite)
    l_i = l_i * alpha + tl.sum(p, 1)
    v = load_rows(keys.v_ptr, keys.v_stride, offs_n, keys.num, D, BLOCK_D, not PLAIN)  # [N, D]
    acc = tl.dot(_zeroed(p.to(v.dtype), kept), v, acc * alpha[:, None])
    return acc, m_new, l_i


@triton.jit(do_not_specialize=_VARYING)
def _attention_fwd_stored_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, words_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, order_ptr, coords_q_ptr,
    coords_k_ptr, seed_ptr, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, num_tokens,
    num_strips, num_words, num_blocks, num_heads, softmax_scale, dropout_scale, drop_max, site, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_PLAIN: tl.constexpr,
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
    coords_q_ptr += start_q * 2
    batch_row, position_q = load_names(coords_q_ptr, offs_m, num_queries)
    if CAUSAL:
        coords_k_ptr += start_k * 2
    keys = Keys(
        k_ptr + start_k * k_stride + wide_head * k_head_stride, v_ptr + start_k * v_stride + wide_head * v_head_stride,
        k_stride, v_stride, coords_k_ptr, num_keys,
    )  # fmt: skip
    k0, k1 = split_seed(tl.load(seed_ptr))
    drop = Drop(k0, k1, site, drop_max, head)
    words_ptr += (wide_head * num_strips + start_q // 16 + sequence) * num_words

    end, num_plain = visible_keys(
        coords_q_ptr, coords_k_ptr, first_query, num_queries, num_keys, BLOCK_M, BLOCK_N, CAUSAL, HAS_PLAIN
    )
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_PLAIN:
        for first_key in tl.range(0, num_plain, BLOCK_N):
            acc, m_i, l_i = _add_keys(
                acc, m_i, l_i, q, first_query, num_queries, keys, first_key, scale_log2, batch_row, position_q, drop,
                words_ptr, num_words, D, BLOCK_N, False, True,
            )  # fmt: skip
    for first_key in tl.range(num_plain, end, BLOCK_N, num_stages=1):
        acc, m_i, l_i = _add_keys(
            acc, m_i, l_i, q, first_query, num_queries, keys, first_key, scale_log2, batch_row, position_q, drop,
            words_ptr, num_words, D, BLOCK_N, CAUSAL, False,
        )  # fmt: skip

    # A query without keys: acc = 0, l_i = 0; its output is 0 and its lse -inf.
    acc *= (dropout_scale / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(l_i)) / LOG2E)
    store_rows(out_ptr + (start_q * num_heads + wide_head) * D, num_heads * D, offs_m, num_queries, acc, D, BLOCK_D)
    tl.store(lse_ptr + wide_head * num_tokens + start_q + offs_m, lse, mask=offs_m < num_queries)


@triton.jit
def _probabilities_and_gradients(
    q, k, v, dout, lse, delta, exists, first_query, num_queries, first_key, scale_log2, position_q, position_k, words,
    num_words, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, ALL_QUERIES: tl.constexpr,
):  # fmt: skip
    """(w, ds) [M, N] of one tile: W / z and dS / z, fp32. lse in base 2, delta already divided by z.

    exists (bool [M, N]): both tokens do; ALL_QUERIES: all queries.
    """
    scores = tl.dot(q, tl.trans(k)) * scale_log2
    if not PLAIN:
        scores = mask_scores(scores, exists, position_q, position_k, Bias(None, 0, 0, 0), CAUSAL)
    p = tl.exp2(scores - lse[:, None])
    dw = tl.dot(dout, tl.trans(v))
    # Here and not before: fewer registers are taken.
    keep = _stored_tile(words, num_words, first_query, num_queries, first_key, q.shape[0], k.shape[0], not ALL_QUERIES)
    w = tl.where(keep, p, 0.0)
    return w, gradients_of_scores(p, w, dw, delta, True)


@triton.jit
def _add_keys_of_dq(
    dq, q, dout, lse, delta, first_query, num_queries, keys, first_key, scale_log2, position_q, words, num_words,
    D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """dq of one tile of keys added to dq [M, BLOCK_D]."""
    BLOCK_D: tl.constexpr = q.shape[1]
    offs_m = first_query + tl.arange(0, q.shape[0])
    offs_n = first_key + tl.arange(0, BLOCK_N)
    k = load_rows(keys.k_ptr, keys.k_stride, offs_n, keys.num, D, BLOCK_D, not PLAIN)
    v = load_rows(keys.v_ptr, keys.v_stride, offs_n, keys.num, D, BLOCK_D, not PLAIN)
    exists = (offs_m < num_queries)[:, None] & (offs_n < keys.num)[None, :]
    position_k = None
    if CAUSAL:
        position_k = load_positions(keys.coords_ptr, offs_n, keys.num)
    _, ds = _probabilities_and_gradients(
        q, k, v, dout, lse, delta, exists, first_query, num_queries, first_key, scale_log2, position_q, position_k,
        words, num_words, CAUSAL, PLAIN, False,
    )  # fmt: skip
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=_VARYING)
def _attention_bwd_dq_stored_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, dq_ptr, lse_ptr, delta_ptr, words_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    order_ptr, coords_q_ptr, coords_k_ptr, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    dout_stride, dout_head_stride, num_tokens, num_strips, num_words, num_blocks, num_heads, softmax_scale,
    dropout_scale, inverse_scale, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_PLAIN: tl.constexpr,
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

    position_q = None
    if CAUSAL:
        coords_q_ptr += start_q * 2
        coords_k_ptr += start_k * 2
        position_q = load_positions(coords_q_ptr, offs_m, num_queries)
    keys = Keys(
        k_ptr + start_k * k_stride + wide_head * k_head_stride, v_ptr + start_k * v_stride + wide_head * v_head_stride,
        k_stride, v_stride, coords_k_ptr, num_keys,
    )  # fmt: skip
    words_ptr += (wide_head * num_strips + start_q // 16 + sequence) * num_words

    end, num_plain = visible_keys(
        coords_q_ptr, coords_k_ptr, first_query, num_queries, num_keys, BLOCK_M, BLOCK_N, CAUSAL, HAS_PLAIN
    )
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_PLAIN:
        for first_key in tl.range(0, num_plain, BLOCK_N):
            dq = _add_keys_of_dq(
                dq, q, dout, lse, delta, first_query, num_queries, keys, first_key, scale_log2, position_q, words_ptr,
                num_words, D, BLOCK_N, False, True,
            )  # fmt: skip
    for first_key in tl.range(num_plain, end, BLOCK_N, num_stages=1):
        dq = _add_keys_of_dq(
            dq, q, dout, lse, delta, first_query, num_queries, keys, first_key, scale_log2, position_q, words_ptr,
            num_words, D, BLOCK_N, CAUSAL, False,
        )  # fmt: skip
    dq *= softmax_scale * dropout_scale
    dq_ptr += (start_q * num_heads * PARTS + wide_head) * D
    store_rows(dq_ptr, num_heads * D, offs_m * PARTS, num_queries * PARTS, dq, D, BLOCK_D)


@triton.jit
def _add_queries(
    dk, dv, k, v, offs_n, num_keys, queries, first_query, first_key, scale_log2, position_k, words, num_words,
    D: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
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
    position_q = None
    if CAUSAL:
        position_q = load_positions(queries.coords_ptr, offs_m, queries.num)
    exists = (offs_m < queries.num)[:, None] & (offs_n < num_keys)[None, :]
    w, ds = _probabilities_and_gradients(
        q, k, v, dout, lse, delta, exists, first_query, queries.num, first_key, scale_log2, position_q, position_k,
        words, num_words, CAUSAL, PLAIN, PLAIN,
    )  # fmt: skip
    dv = tl.dot(tl.trans(w.to(dout.dtype)), dout, dv)
    dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=_VARYING)
def _attention_bwd_dkdv_stored_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, words_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    order_ptr, coords_q_ptr, coords_k_ptr, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    dout_stride, dout_head_stride, num_tokens, num_strips, num_words, num_blocks, num_heads, softmax_scale,
    dropout_scale, inverse_scale, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_PLAIN: tl.constexpr,
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
    if CAUSAL:
        coords_q_ptr += start_q * 2
        coords_k_ptr += start_k * 2
        position_k = load_positions(coords_k_ptr, offs_n, num_keys)
    queries = _Queries(
        q_ptr + start_q * q_stride + wide_head * q_head_stride,
        dout_ptr + start_q * dout_stride + wide_head * dout_head_stride, lse_ptr + statistics, delta_ptr + statistics,
        q_stride, dout_stride, coords_q_ptr, num_queries, inverse_scale,
    )  # fmt: skip
    words_ptr += (wide_head * num_strips + start_q // 16 + sequence) * num_words

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
                dk, dv, k, v, offs_n, num_keys, queries, first_query, first_key, scale_log2, position_k, words_ptr,
                num_words, D, BLOCK_M, CAUSAL, False,
            )  # fmt: skip
    if HAS_PLAIN:
        for first_query in tl.range(plain_begin, plain_end, BLOCK_M):
            dk, dv = _add_queries(
                dk, dv, k, v, offs_n, num_keys, queries, first_query, first_key, scale_log2, None, words_ptr,
                num_words, D, BLOCK_M, False, True,
            )  # fmt: skip
        if plain_end < num_queries:
            dk, dv = _add_queries(
                dk, dv, k, v, offs_n, num_keys, queries, plain_end, first_key, scale_log2, position_k, words_ptr,
                num_words, D, BLOCK_M, CAUSAL, False,
            )  # fmt: skip
    offset = (start_k * num_heads * PARTS + wide_head) * D
    dk *= softmax_scale * dropout_scale
    rows, num_rows = offs_n * PARTS, num_keys * PARTS
    store_rows(dk_ptr + offset, num_heads * D, rows, num_rows, dk, D, BLOCK_D)
    store_rows(dv_ptr + offset, num_heads * D, rows, num_rows, dv * dropout_scale, D, BLOCK_D)
