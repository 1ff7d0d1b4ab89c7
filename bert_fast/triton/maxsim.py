"""Late interaction in Triton: similarities live in registers, tile by tile; only their maxima leave them.

    best[j, p]   = max over tokens t of document j of q_p . d_t, chosen[j, p] = the first t of it     (fwd)
    scores[i, j] = sum over tokens p of query i of best[j, p]; EMPTY for a document without tokens    (fwd_sum)
    dq_p = sum over j of g[i, j] d_chosen[j, p]                                                       (bwd_dqueries)
    dd_t = sum over p with chosen[j, p] = t of g[i, j] q_p, as a product with the one-hot columns     (bwd_ddocuments)

Source: Khattab and Zaharia 2020 (arXiv:2004.12832), section 3.3. Derivation and layout: docs/kernels/maxsim.md.

Shapes: queries [Tq, H], documents [Td, H]; best, chosen [D, Tq]; scores, g [Q, D]; owners [Tq], the query of a token.
Bytes moved, with elements of e bytes:
    fwd             Tq / BLOCK_M times Td H e and D times Tq H e read, both from the cache; 8 D Tq written
    fwd_sum         4 D Tq read, 4 Q D written
    bwd_dqueries    D Tq (H e + 4) read from the cache, Tq H e written
    bwd_ddocuments  Td / BLOCK_N times Tq (H e + 4) read from the cache, Td H e written
Saved: chosen, 4 D Tq bytes. best is dropped once it is summed.
Precision: products accumulate in fp32. In bwd_ddocuments the upstream gradient is rounded to the dtype of queries.
Determinism: no atomics; every sum is taken in an order that shapes alone decide. No device sync.
"""

from collections.abc import Set

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.reference.maxsim import EMPTY, Maxsim
from bert_fast.triton._gemm import _precision
from bert_fast.triton._launch import architecture, ceil_div, unit_stride
from bert_fast.triton._launch_plan import launch_plan

# 128 tokens of queries (four queries of 32) times 64 of a document: maxima, tile numbers and similarities are 3 x 64
# registers of each of 128 threads. fp32 takes 32 tokens: its operands take twice the shared memory, and three terms of
# TF32 the registers.
_BLOCK_M, _BLOCK_M_FP32, _BLOCK_N = 128, 32, 64
_FWD_WARPS, _FWD_STAGES = 8, 2
_MOST_COLUMNS = 128  # of H at a time
# Of several steps along H: 48 KB of shared memory in two stages. fp32 as three terms of TF32 takes registers for each.
_FWD_STEP, _FWD_STEP_FP32 = 64, 32
_SUM_DOCUMENTS, _SUM_TOKENS, _SUM_WARPS = 16, 64, 4
_GATHER_TOKENS, _GATHER_DOCUMENTS, _GATHER_WARPS = 4, 8, 4  # 32 rows in flight, 32 elements of each thread
_DDOCUMENTS_N, _DDOCUMENTS_M, _DDOCUMENTS_WARPS = 64, 64, 4
_DDOCUMENTS_FP32, _DDOCUMENTS_COLUMNS_FP32 = 32, 64  # tokens of both; half as many columns

_EMPTY = tl.constexpr(EMPTY)


@triton.jit
def _columns(ptr, rows, stride, mask, start, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Tile [ROWS, BLOCK_H] of a matrix from column `start` on, 0 where there is none."""
    offs_h = start + tl.arange(0, BLOCK_H)
    offsets = rows.to(tl.int64)[:, None] * stride + offs_h[None, :]
    return tl.load(ptr + offsets, mask=mask[:, None] & (offs_h[None, :] < H), other=0.0)


@triton.jit(do_not_specialize=["n_queries_tokens"])
def _maxsim_fwd_kernel(
    queries_ptr,
    documents_ptr,
    cu_seqlens_d_ptr,
    best_ptr,
    chosen_ptr,
    queries_stride,
    documents_stride,
    n_queries_tokens,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_M tokens of queries with one document per program.

    Every place of a tile of similarities keeps its own maximum over the tiles, and which tile it came from, so that
    places are compared with each other once, at the end. `!=` after the maximum keeps the first tile of several.
    """
    # 1. Tokens of this program.
    document = tl.program_id(1).to(tl.int64)
    first = tl.load(cu_seqlens_d_ptr + document)
    end = tl.load(cu_seqlens_d_ptr + document + 1)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < n_queries_tokens
    offs_n = tl.arange(0, BLOCK_N)
    if H <= BLOCK_H:
        q = _columns(queries_ptr, offs_m, queries_stride, mask_m, 0, H, BLOCK_H)  # [BLOCK_M, BLOCK_H]

    # 2. The maximum of every place over the tiles of the document, [BLOCK_M, BLOCK_N].
    best = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    tiles = tl.zeros([BLOCK_M, BLOCK_N], tl.int32) + first
    for start in tl.range(first, end, BLOCK_N):
        tokens = start + offs_n
        mask_n = tokens < end
        if H <= BLOCK_H:
            d = _columns(documents_ptr, tokens, documents_stride, mask_n, 0, H, BLOCK_H)  # [BLOCK_N, BLOCK_H]
            similarities = tl.dot(q, tl.trans(d), input_precision=PRECISION)
        else:
            similarities = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for column in tl.range(0, H, BLOCK_H):
                q_part = _columns(queries_ptr, offs_m, queries_stride, mask_m, column, H, BLOCK_H)
                d_part = _columns(documents_ptr, tokens, documents_stride, mask_n, column, H, BLOCK_H)
                similarities = tl.dot(q_part, tl.trans(d_part), similarities, input_precision=PRECISION)
        similarities = tl.where(mask_n[None, :], similarities, float("-inf"))
        higher = tl.maximum(best, similarities, propagate_nan=tl.PropagateNan.ALL)
        tiles = tl.where(higher != best, start, tiles)
        best = higher

    # 3. The maximum over places: the first token that has it. NaN is the maximum where there is one.
    is_nan = best != best
    has_nan = tl.max(is_nan.to(tl.int32), 1) > 0  # [BLOCK_M]
    maximum = tl.where(has_nan, float("nan"), tl.max(tl.where(is_nan, float("-inf"), best), 1))
    is_it = tl.where(has_nan[:, None], is_nan, best == maximum[:, None])
    token = tl.min(tl.where(is_it, tiles + offs_n[None, :], 2147483647), 1)
    token = tl.minimum(token, end - 1)  # a NaN's tile may be a later one
    offsets = document * n_queries_tokens + offs_m
    tl.store(best_ptr + offsets, maximum, mask=mask_m)
    tl.store(chosen_ptr + offsets, tl.where(first < end, token, -1), mask=mask_m)


@triton.jit(do_not_specialize=["n_queries_tokens", "n_documents"])
def _maxsim_fwd_sum_kernel(
    best_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_d_ptr,
    scores_ptr,
    n_queries_tokens,
    n_documents,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The scores of one query and BLOCK_D documents per program."""
    query = tl.program_id(0).to(tl.int64)
    documents = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = documents < n_documents
    first = tl.load(cu_seqlens_q_ptr + query)
    end = tl.load(cu_seqlens_q_ptr + query + 1)
    acc = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    for start in tl.range(first, end, BLOCK_M):
        tokens = start + tl.arange(0, BLOCK_M)
        offsets = documents.to(tl.int64)[:, None] * n_queries_tokens + tokens[None, :]
        acc += tl.load(best_ptr + offsets, mask=mask_d[:, None] & (tokens < end)[None, :], other=0.0)
    begins = tl.load(cu_seqlens_d_ptr + documents, mask=mask_d, other=0)
    ends = tl.load(cu_seqlens_d_ptr + documents + 1, mask=mask_d, other=0)
    scores = tl.where(begins < ends, tl.sum(acc, 1), _EMPTY)
    tl.store(scores_ptr + query * n_documents + documents, scores, mask=mask_d)


@triton.jit(do_not_specialize=["n_queries_tokens", "n_documents"])
def _maxsim_bwd_dqueries_kernel(
    dscores_ptr,
    owners_ptr,
    chosen_ptr,
    documents_ptr,
    dqueries_ptr,
    documents_stride,
    n_queries_tokens,
    n_documents,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """BLOCK_M tokens of queries and BLOCK_H columns per program; the chosen tokens of BLOCK_D documents at a time."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_m, mask_h = tokens < n_queries_tokens, offs_h < H
    owners = tl.load(owners_ptr + tokens, mask=mask_m, other=0)
    acc = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for start in tl.range(0, n_documents, BLOCK_D):
        documents = start + tl.arange(0, BLOCK_D)
        mask = (documents < n_documents)[:, None] & mask_m[None, :]  # [BLOCK_D, BLOCK_M]
        offsets = documents.to(tl.int64)[:, None] * n_queries_tokens + tokens[None, :]
        chosen = tl.load(chosen_ptr + offsets, mask=mask, other=-1)
        mask = mask & (chosen >= 0)
        offsets = owners.to(tl.int64)[None, :] * n_documents + documents[:, None]
        weights = tl.load(dscores_ptr + offsets, mask=mask, other=0.0)
        rows = chosen.to(tl.int64)[:, :, None] * documents_stride + offs_h[None, None, :]
        d = tl.load(documents_ptr + rows, mask=mask[:, :, None] & mask_h[None, None, :], other=0.0)
        acc += tl.sum(weights[:, :, None] * d.to(tl.float32), 0)
    offsets = tokens.to(tl.int64)[:, None] * H + offs_h[None, :]
    dqueries = acc.to(dqueries_ptr.dtype.element_ty)
    tl.store(dqueries_ptr + offsets, dqueries, mask=mask_m[:, None] & mask_h[None, :])


@triton.jit(do_not_specialize=["n_queries_tokens", "n_documents"])
def _maxsim_bwd_ddocuments_kernel(
    dscores_ptr,
    owners_ptr,
    chosen_ptr,
    queries_ptr,
    cu_seqlens_d_ptr,
    ddocuments_ptr,
    queries_stride,
    n_queries_tokens,
    n_documents,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_N tokens of a document and BLOCK_H columns per program, over all tokens of queries."""
    NUM_PARTS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    document = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) // NUM_PARTS
    column = tl.program_id(0) % NUM_PARTS * BLOCK_H
    end = tl.load(cu_seqlens_d_ptr + document + 1)
    first = tl.load(cu_seqlens_d_ptr + document) + block * BLOCK_N
    if first < end:
        offs_n = first + tl.arange(0, BLOCK_N)
        acc = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
        for start in tl.range(0, n_queries_tokens, BLOCK_M):
            tokens = start + tl.arange(0, BLOCK_M)
            mask_m = tokens < n_queries_tokens
            chosen = tl.load(chosen_ptr + document * n_queries_tokens + tokens, mask=mask_m, other=-1)
            owners = tl.load(owners_ptr + tokens, mask=mask_m, other=0)
            weights = tl.load(dscores_ptr + owners.to(tl.int64) * n_documents + document, mask=mask_m, other=0.0)
            q = _columns(queries_ptr, tokens, queries_stride, mask_m, column, H, BLOCK_H)  # [BLOCK_M, BLOCK_H]
            one_hot = tl.where(offs_n[:, None] == chosen[None, :], weights[None, :], 0.0)  # [BLOCK_N, BLOCK_M]
            acc = tl.dot(one_hot.to(q.dtype), q, acc, input_precision=PRECISION)
        offs_h = column + tl.arange(0, BLOCK_H)
        offsets = offs_n.to(tl.int64)[:, None] * H + offs_h[None, :]
        ddocuments = acc.to(ddocuments_ptr.dtype.element_ty)
        tl.store(ddocuments_ptr + offsets, ddocuments, mask=(offs_n < end)[:, None] & (offs_h < H)[None, :])


def _block_columns(hidden_size: int, most: int = _MOST_COLUMNS) -> int:
    """Columns of a tile: a power of two from 16, the least of a product, up to `most`."""
    return min(most, max(16, 1 << (hidden_size - 1).bit_length())) if hidden_size else 16


def forward_tile(hidden_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_H) of forward: vectors of up to 128 elements of half precision are one step."""
    if dtype == torch.float32:
        return _BLOCK_M_FP32, _block_columns(hidden_size, _FWD_STEP_FP32)
    return _BLOCK_M, _block_columns(hidden_size, _MOST_COLUMNS if hidden_size <= _MOST_COLUMNS else _FWD_STEP)


def maxsim_fwd(a: Maxsim) -> tuple[Tensor, Tensor]:
    """scores [Q, D], chosen [D, Tq], as `reference.maxsim`; beside a NaN, a token that has one."""
    queries, documents = unit_stride(a.queries), unit_stride(a.documents)
    cu_seqlens_q, cu_seqlens_d = a.cu_seqlens_q.contiguous(), a.cu_seqlens_d.contiguous()
    num_tokens, hidden_size = queries.shape
    num_queries, num_documents = len(cu_seqlens_q) - 1, len(cu_seqlens_d) - 1
    best = torch.empty(num_documents, num_tokens, dtype=torch.float32, device=queries.device)
    chosen = torch.empty(num_documents, num_tokens, dtype=torch.int32, device=queries.device)
    scores = torch.empty(num_queries, num_documents, dtype=torch.float32, device=queries.device)
    if best.numel():
        block_m, block_h = forward_tile(hidden_size, queries.dtype)
        launch_plan(
            _maxsim_fwd_kernel,
            H=hidden_size,
            BLOCK_M=block_m,
            BLOCK_N=_BLOCK_N,
            BLOCK_H=block_h,
            PRECISION=_precision(queries.dtype, architecture(queries.device)),
            num_warps=_FWD_WARPS,
            enable_fp_fusion=True,
            num_stages=_FWD_STAGES,
        )(
            (ceil_div(num_tokens, block_m), num_documents),
            (queries, documents, cu_seqlens_d, best, chosen),
            (queries.stride(0), documents.stride(0), num_tokens),
        )
    if scores.numel():
        launch_plan(
            _maxsim_fwd_sum_kernel,
            BLOCK_D=_SUM_DOCUMENTS,
            BLOCK_M=_SUM_TOKENS,
            num_warps=_SUM_WARPS,
            enable_fp_fusion=True,
        )(
            (num_queries, ceil_div(num_documents, _SUM_DOCUMENTS)),
            (best, cu_seqlens_q, cu_seqlens_d, scores),
            (num_tokens, num_documents),
        )
    return scores, chosen


def maxsim_bwd(a: Maxsim, dscores: Tensor, chosen: Tensor, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, as `reference.maxsim`; for that of documents queries must be finite."""
    queries, documents = unit_stride(a.queries), unit_stride(a.documents)
    dscores, chosen = dscores.contiguous(), chosen.contiguous()
    num_tokens, hidden_size = queries.shape
    num_documents = len(chosen)
    # [Tq]: how many queries end at a token or before it.
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=queries.device)
    owners = torch.searchsorted(a.cu_seqlens_q[1:].contiguous(), tokens, right=True, out_int32=True)
    made = {}
    if "queries" in wants:
        made["queries"] = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if made["queries"].numel():
            block_h = _block_columns(hidden_size)
            launch_plan(
                _maxsim_bwd_dqueries_kernel,
                H=hidden_size,
                BLOCK_M=_GATHER_TOKENS,
                BLOCK_D=_GATHER_DOCUMENTS,
                BLOCK_H=block_h,
                num_warps=_GATHER_WARPS,
                enable_fp_fusion=True,
            )(
                (ceil_div(num_tokens, _GATHER_TOKENS), ceil_div(hidden_size, block_h)),
                (dscores, owners, chosen, documents, made["queries"]),
                (documents.stride(0), num_tokens, num_documents),
            )
    if "documents" in wants:
        made["documents"] = torch.empty(documents.shape, dtype=documents.dtype, device=documents.device)
        if made["documents"].numel():
            is_fp32 = queries.dtype == torch.float32
            block_n, block_m = (_DDOCUMENTS_FP32,) * 2 if is_fp32 else (_DDOCUMENTS_N, _DDOCUMENTS_M)
            block_h = _block_columns(hidden_size, _DDOCUMENTS_COLUMNS_FP32 if is_fp32 else _MOST_COLUMNS)
            launch_plan(
                _maxsim_bwd_ddocuments_kernel,
                H=hidden_size,
                BLOCK_N=block_n,
                BLOCK_M=block_m,
                BLOCK_H=block_h,
                PRECISION=_precision(queries.dtype, architecture(queries.device)),
                num_warps=_DDOCUMENTS_WARPS,
                enable_fp_fusion=True,
            )(
                (ceil_div(a.max_seqlen_d, block_n) * ceil_div(hidden_size, block_h), num_documents),
                (dscores, owners, chosen, queries, a.cu_seqlens_d.contiguous(), made["documents"]),
                (queries.stride(0), num_tokens, num_documents),
            )
    return made
