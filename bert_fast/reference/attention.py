"""Multi-head attention of a ragged batch, one sequence after the other, as in the textbook.

For one sequence and head, with queries Q [Sq, D], keys K and values V [Sk, D]:

    S   = softmax_scale * (Q K^T + R) + bias        R: relative_positions.py; entries that a mask removes are -inf
    lse = log sum exp(S)                            over keys
    P   = exp(S - lse)                              softmax; 0 where no key is left
    W   = P * Z * m                                 Z = keep * scale, dropout's mask; m, the head mask
    O   = W V

Backward (Dao et al. 2022, arXiv:2205.14135, appendix B.2, which has no m; delta is unchanged by it):

    dV    = W^T dO
    dW    = dO V^T
    dm    = P * Z * dW                              summed to the shape of m
    dP    = dW * Z * m
    delta = rowsum(dO * O) = rowsum(P * dP)
    dS    = P * (dP - delta)
    dbias = dS                                      summed to the shape of bias
    dQ    = softmax_scale * dS K,   dK = softmax_scale * dS^T Q,   and through R

A query that no key is left for attends to nothing: O = 0, lse = -inf, and every gradient through it is 0. (Hugging Face
adds a large negative number to such a row and so averages over the very keys that were masked.)

A token is named by (row, position): its sequence's index in the original batch, its index in that sequence. Masks,
biases and dropout are looked up under these names, so padding that was removed changes nothing.

Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2. Precision: fp32 throughout (fp64 for fp64 inputs).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.dropout import attention_keep_mask, dropout_scale
from bert_fast.reference.precision import wide, wide_dtype
from bert_fast.reference.relative_positions import relative_scores_bwd, relative_scores_fwd

__all__ = [
    "AttentionExtras",
    "AttentionGradients",
    "AttentionResult",
    "attention_bwd",
    "attention_extras_bwd",
    "attention_extras_fwd",
    "attention_fwd",
]


@dataclass(frozen=True)
class AttentionExtras:
    """What attention can be given beyond the plain signature; each may be None. B counts the original batch's rows.

    bias (Tensor broadcastable to [B, A, Sq, Sk]): added to the scaled scores; -inf removes a key from a query. Indexed
        by row, head and positions.
    head_mask (Tensor broadcastable to [B, A, Sq, Sk]): multiplies the probabilities after dropout.
    distance_table (Tensor [2M-1, D]): relative positions; key_term: keys look at it too (relative_key_query).
    """

    bias: Tensor | None = None
    head_mask: Tensor | None = None
    distance_table: Tensor | None = None
    key_term: bool = False


class AttentionResult(NamedTuple):
    """out (Tensor [Tq, A, D]); lse (Tensor [A, Tq]); probabilities: W [A, Sq, Sk] of every sequence, in order."""

    out: Tensor
    lse: Tensor
    probabilities: list[Tensor]


class AttentionGradients(NamedTuple):
    """Gradients of q, k, v and of the extras that were given."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dhead_mask: Tensor | None
    ddistance_table: Tensor | None


class _Sequence(NamedTuple):
    """Where one sequence's tokens lie in the packed tensors, and what they are called."""

    queries: slice
    keys: slice
    row: int
    positions_q: Tensor  # [Sq]
    positions_k: Tensor  # [Sk]


def _sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, coords_q: Tensor | None, coords_k: Tensor | None
) -> Iterator[_Sequence]:
    """The sequences in order. Without coords, sequences are rows and tokens are counted from 0."""
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    device = cu_seqlens_q.device
    for index in range(len(bounds_q) - 1):
        queries, keys = slice(*bounds_q[index : index + 2]), slice(*bounds_k[index : index + 2])
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        yield _Sequence(
            queries,
            keys,
            index if coords_q is None or num_queries == 0 else int(coords_q[queries.start, 0]),
            torch.arange(num_queries, device=device) if coords_q is None else coords_q[queries, 1],
            torch.arange(num_keys, device=device) if coords_k is None else coords_k[keys, 1],
        )


def _index_of(batched: Tensor, sequence: _Sequence) -> tuple[Tensor, ...]:
    """Index of a sequence's [A or 1, Sq or 1, Sk or 1] block in a tensor broadcastable to [B, A, Sq, Sk]."""
    rows, heads, queries, keys = batched.shape
    device = batched.device
    nothing = torch.zeros(1, dtype=torch.long, device=device)  # the one index of a broadcast dimension
    return (
        torch.tensor(sequence.row if rows > 1 else 0, device=device),
        torch.arange(heads, device=device)[:, None, None],
        (sequence.positions_q.long() if queries > 1 else nothing)[:, None],
        sequence.positions_k.long() if keys > 1 else nothing,
    )


def _add_block(total: Tensor, sequence: _Sequence, block: Tensor) -> None:
    """Adds block [A, Sq, Sk], summed over the dimensions that `total` broadcasts, in its place in `total`."""
    broadcast = [dim for dim in range(3) if total.shape[dim + 1] == 1]
    summed = block.sum(broadcast, keepdim=True) if broadcast else block
    total.index_put_(_index_of(total, sequence), summed.to(total.dtype), accumulate=True)


def _scores(
    q: Tensor, k: Tensor, sequence: _Sequence, softmax_scale: float, causal: bool, extras: AttentionExtras
) -> Tensor:
    """S [A, Sq, Sk] of one sequence, for wide q [A, Sq, D] and k [A, Sk, D]."""
    scores = q @ k.transpose(1, 2)
    if extras.distance_table is not None:
        table = extras.distance_table.to(q.dtype)
        positions = sequence.positions_q, sequence.positions_k
        scores = scores + relative_scores_fwd(q, k, table, *positions, extras.key_term)
    scores = scores * softmax_scale
    if extras.bias is not None:
        scores = scores + extras.bias[_index_of(extras.bias, sequence)].to(q.dtype)
    if causal:
        later = sequence.positions_k[None, :] > sequence.positions_q[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """P and lse over the last dimension; rows of nothing but -inf give P = 0 and lse = -inf."""
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -torch.inf)
    # Subtracting the largest score changes nothing but the range of exp; it is a constant to autograd.
    largest = scores.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    probabilities = weights / total.masked_fill(total == 0.0, 1.0)
    return probabilities, (largest + torch.log(total.detach())).squeeze(-1)


def _multiplier(
    q: Tensor,
    sequence: _Sequence,
    dropout_p: float,
    seed: Tensor | None,
    coords_q: Tensor | None,
    site: int,
) -> Tensor | None:
    """Z [A, Sq, Sk] of one sequence, None without dropout."""
    if dropout_p == 0.0:
        return None
    assert seed is not None and coords_q is not None
    keep = attention_keep_mask(seed, site, coords_q[sequence.queries], len(sequence.positions_k), q.shape[0], dropout_p)
    return keep.to(q.dtype) * dropout_scale(dropout_p)


def _per_head(x: Tensor, tokens: slice) -> Tensor:
    """[A, S, D] of one sequence, wide, from packed [T, A, D]."""
    return wide(x[tokens].transpose(0, 1))


def attention_extras_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    dropout_p: float,
    seed: Tensor | None,
    coords_q: Tensor | None,
    coords_k: Tensor | None,
    site: int,
    causal: bool,
    extras: AttentionExtras,
) -> AttentionResult:
    """Attention with everything BERT ever had: the arguments of `attention_fwd`, and the extras.

    Returns: out (Tensor [Tq, A, D], dtype of q); lse (Tensor [A, Tq], fp32; fp64 for fp64 inputs); probabilities: one
        Tensor [A, Sq, Sk] per sequence, as multiplied with v. out and probabilities are differentiable by autograd.
    """
    num_heads, head_dim = v.shape[1:]
    outs = [torch.zeros(0, num_heads, head_dim, dtype=wide_dtype(q.dtype), device=q.device)]
    lses = [torch.zeros(num_heads, 0, dtype=wide_dtype(q.dtype), device=q.device)]
    probabilities = []
    for sequence in _sequences(cu_seqlens_q, cu_seqlens_k, coords_q, coords_k):
        q_, k_, v_ = _per_head(q, sequence.queries), _per_head(k, sequence.keys), _per_head(v, sequence.keys)
        weights, lse = _softmax(_scores(q_, k_, sequence, softmax_scale, causal, extras))
        dropped = _multiplier(q_, sequence, dropout_p, seed, coords_q, site)
        if dropped is not None:
            weights = weights * dropped
        if extras.head_mask is not None:
            weights = weights * extras.head_mask[_index_of(extras.head_mask, sequence)].to(weights.dtype)
        outs.append((weights @ v_).transpose(0, 1))
        lses.append(lse)
        probabilities.append(weights.to(q.dtype))
    return AttentionResult(torch.cat(outs).to(q.dtype), torch.cat(lses, dim=1), probabilities)


def attention_extras_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    dropout_p: float,
    seed: Tensor | None,
    coords_q: Tensor | None,
    coords_k: Tensor | None,
    site: int,
    causal: bool,
    extras: AttentionExtras,
) -> AttentionGradients:
    """Gradients of `attention_extras_fwd` through out, P recomputed from q, k and lse.

    dout, out (Tensors [Tq, A, D]); lse (Tensor [A, Tq]); the rest as in forward.
    Returns: dq, dk, dv and the gradient of every extra that was given, each in the shape and dtype of its tensor.
    """
    work = wide_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=work, device=x.device) for x in (q, k, v))
    dbias, dhead_mask, dtable = (
        None if x is None else torch.zeros(x.shape, dtype=work, device=x.device)
        for x in (extras.bias, extras.head_mask, extras.distance_table)
    )
    for sequence in _sequences(cu_seqlens_q, cu_seqlens_k, coords_q, coords_k):
        q_, dout_, out_ = (_per_head(x, sequence.queries) for x in (q, dout, out))
        k_, v_ = (_per_head(x, sequence.keys) for x in (k, v))
        scores = _scores(q_, k_, sequence, softmax_scale, causal, extras)
        lse_ = lse[:, sequence.queries, None].to(work)
        p = torch.exp(scores - lse_.masked_fill(lse_ == -torch.inf, 0.0))  # exp(-inf) = 0 where no key is left
        dropped = _multiplier(q_, sequence, dropout_p, seed, coords_q, site)
        zp = p if dropped is None else p * dropped

        dw = dout_ @ v_.transpose(1, 2)
        w, dzp = zp, dw
        if extras.head_mask is not None and dhead_mask is not None:
            m = extras.head_mask[_index_of(extras.head_mask, sequence)].to(work)
            w, dzp = zp * m, dw * m
            _add_block(dhead_mask, sequence, zp * dw)
        dp = dzp if dropped is None else dzp * dropped
        delta = (dout_ * out_).sum(-1, keepdim=True)
        ds = p * (dp - delta)
        if dbias is not None:
            _add_block(dbias, sequence, ds)

        ds = ds * softmax_scale
        dq_, dk_ = ds @ k_, ds.transpose(1, 2) @ q_
        if extras.distance_table is not None and dtable is not None:
            table = extras.distance_table.to(work)
            positions = sequence.positions_q, sequence.positions_k
            dq_relative, dk_relative, dtable_ = relative_scores_bwd(ds, q_, k_, table, *positions, extras.key_term)
            dq_, dk_ = dq_ + dq_relative, dk_ + dk_relative
            dtable += dtable_
        dq[sequence.queries] = dq_.transpose(0, 1)
        dk[sequence.keys] = dk_.transpose(0, 1)
        dv[sequence.keys] = (w.transpose(1, 2) @ dout_).transpose(0, 1)
    return AttentionGradients(
        dq.to(q.dtype),
        dk.to(k.dtype),
        dv.to(v.dtype),
        None if extras.bias is None or dbias is None else dbias.to(extras.bias.dtype),
        None if extras.head_mask is None or dhead_mask is None else dhead_mask.to(extras.head_mask.dtype),
        None if extras.distance_table is None or dtable is None else dtable.to(extras.distance_table.dtype),
    )


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    dropout_p: float,
    seed: Tensor | None,
    coords_q: Tensor | None,
    coords_k: Tensor | None,
    site: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """softmax(softmax_scale * Q K^T) V within every sequence, with dropout on the probabilities.

    q (Tensor [Tq, A, D]); k, v (Tensors [Tk, A, D]): packed tokens.
    cu_seqlens_q, cu_seqlens_k (Tensors [B + 1], int32): sequence b owns tokens cu_seqlens[b] .. cu_seqlens[b+1] - 1.
    max_seqlen_q, max_seqlen_k: the longest lengths; not needed here, other back-ends size their grids by them.
    dropout_p: probability of dropping; seed (Tensor [1], int64) and site name the mask, may be None and 0 without it.
    coords_q, coords_k (Tensors [Tq, 2], [Tk, 2], int32, or None): (row, position) of every token. None, allowed without
        dropout, counts the tokens of a sequence from 0.
    causal: a query sees the keys up to its own position only.
    Returns: out (Tensor [Tq, A, D], dtype of q); lse (Tensor [A, Tq], fp32; fp64 for fp64 inputs), the natural
        logarithm of the sum of exp of the scaled scores. Where no key is left, out is 0 and lse -inf.
    """
    result = attention_extras_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, dropout_p, seed, coords_q, coords_k, site, causal,
        AttentionExtras(),
    )  # fmt: skip
    return result.out, result.lse


def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    dropout_p: float,
    seed: Tensor | None,
    coords_q: Tensor | None,
    coords_k: Tensor | None,
    site: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention_fwd`: dq [Tq, A, D], dk and dv [Tk, A, D], each in its tensor's dtype."""
    gradients = attention_extras_bwd(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, softmax_scale, dropout_p, seed, coords_q, coords_k, site,
        causal, AttentionExtras(),
    )  # fmt: skip
    return gradients.dq, gradients.dk, gradients.dv
