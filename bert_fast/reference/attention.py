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

A token is named by (row, position): its sequence's index in the original batch, its index in that sequence. Causal
order, biases, head masks and distances are looked up under these names, so padding that was removed changes nothing.
Dropout names queries alike, but keys by their ordinal in the kept sequence (dropout.py).

Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2. Precision: fp32 throughout (fp64 for fp64 inputs).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.dropout import attention_keep_mask, dropout_scale
from bert_fast.reference.precision import wide, wide_dtype
from bert_fast.reference.relative_positions import relative_scores_bwd, relative_scores_fwd

__all__ = ["attention_bwd", "attention_fwd", "attention_with_probabilities"]


class _Rules(NamedTuple):
    """What happens to scores and probabilities, whatever the tokens; see `attention_fwd`."""

    softmax_scale: float
    dropout_p: float
    seed: Tensor | None
    site: int
    causal: bool
    bias: Tensor | None
    head_mask: Tensor | None
    distance_table: Tensor | None
    key_term: bool


class _Sequence(NamedTuple):
    """Where one sequence's tokens lie in the packed tensors, and what they are called."""

    queries: slice
    keys: slice
    coords_q: Tensor  # [Sq, 2]
    positions_k: Tensor  # [Sk]

    @property
    def row(self) -> int:
        """In the original batch; 0 for a sequence without queries, which looks nothing up."""
        return int(self.coords_q[0, 0]) if len(self.coords_q) else 0

    @property
    def positions_q(self) -> Tensor:
        """[Sq]."""
        return self.coords_q[:, 1]


def _counted(cu_seqlens: Tensor) -> Tensor:
    """The names of tokens that nobody named: sequences are rows, tokens count from 0. int32 [T, 2]."""
    lengths = cu_seqlens.diff().long()
    rows = torch.arange(len(lengths), device=cu_seqlens.device).repeat_interleave(lengths)
    positions = torch.arange(len(rows), device=cu_seqlens.device) - cu_seqlens[rows]
    return torch.stack([rows, positions], dim=1).int()


def _sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, coords_q: Tensor | None, coords_k: Tensor | None
) -> Iterator[_Sequence]:
    """The sequences in order."""
    coords_q = _counted(cu_seqlens_q) if coords_q is None else coords_q
    coords_k = _counted(cu_seqlens_k) if coords_k is None else coords_k
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for index in range(len(bounds_q) - 1):
        queries, keys = slice(*bounds_q[index : index + 2]), slice(*bounds_k[index : index + 2])
        yield _Sequence(queries, keys, coords_q[queries], coords_k[keys, 1])


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
    if not block.numel():
        return
    broadcast = [dim for dim in range(3) if total.shape[dim + 1] == 1]
    summed = block.sum(broadcast, keepdim=True) if broadcast else block
    total.index_put_(_index_of(total, sequence), summed.to(total.dtype), accumulate=True)


def _scores(q: Tensor, k: Tensor, sequence: _Sequence, rules: _Rules) -> Tensor:
    """S [A, Sq, Sk] of one sequence, for wide q [A, Sq, D] and k [A, Sk, D]."""
    scores = q @ k.transpose(1, 2)
    if rules.distance_table is not None:
        table = rules.distance_table.to(q.dtype)
        scores = scores + relative_scores_fwd(q, k, table, sequence.positions_q, sequence.positions_k, rules.key_term)
    scores = scores * rules.softmax_scale
    if rules.bias is not None and scores.numel():
        scores = scores + rules.bias[_index_of(rules.bias, sequence)].to(q.dtype)
    if rules.causal:
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


def _kept(p: Tensor, sequence: _Sequence, rules: _Rules) -> Tensor | None:
    """Z [A, Sq, Sk] of one sequence, None without dropout."""
    if rules.dropout_p == 0.0:
        return None
    assert rules.seed is not None
    num_heads, _, num_keys = p.shape
    keep = attention_keep_mask(rules.seed, rules.site, sequence.coords_q, num_keys, num_heads, rules.dropout_p)
    return keep.to(p.dtype) * dropout_scale(rules.dropout_p)


def _head_mask(p: Tensor, sequence: _Sequence, rules: _Rules) -> Tensor | None:
    """m of one sequence, broadcastable to [A, Sq, Sk], None without a head mask."""
    if rules.head_mask is None or not p.numel():
        return None
    return rules.head_mask[_index_of(rules.head_mask, sequence)].to(p.dtype)


def _times(x: Tensor, *factors: Tensor | None) -> Tensor:
    for factor in factors:
        x = x if factor is None else x * factor
    return x


def _per_head(x: Tensor, tokens: slice) -> Tensor:
    """[A, S, D] of one sequence, wide, from packed [T, A, D]."""
    return wide(x[tokens].transpose(0, 1))


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor | None, coords_k: Tensor | None,
    site: int, causal: bool, bias: Tensor | None, head_mask: Tensor | None, distance_table: Tensor | None,
    key_term: bool, sequence_order: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention within every sequence, with everything BERT ever had.

    q (Tensor [Tq, A, D]); k, v (Tensors [Tk, A, D]): packed tokens.
    cu_seqlens_q, cu_seqlens_k (Tensors [B + 1], int32): sequence b owns tokens cu_seqlens[b] .. cu_seqlens[b+1] - 1.
    max_seqlen_q, max_seqlen_k: the longest lengths; not needed here, other back-ends size their grids by them.
    dropout_p: probability of dropping; seed (Tensor [1], int64) and site name the mask, may be None and 0 without it.
    coords_q, coords_k (Tensors [Tq, 2], [Tk, 2], int32, or None): (row, position) of every token; positions rise
        within a sequence, with holes where padding stood. None counts the tokens of a sequence from 0; other back-ends
        want coords_q with dropout, and both with causal, bias, head_mask and distance_table.
    causal: a query sees the keys up to its own position only.
    bias (Tensor broadcastable to [B, A, Sq, Sk], floating): added to the scaled scores; -inf removes a key from a
        query. B counts the original batch's rows, Sq and Sk reach beyond the largest position.
    head_mask (Tensor broadcastable to [B, A, Sq, Sk], floating): multiplies the probabilities after dropout.
    distance_table (Tensor [2M-1, D]): relative positions; key_term: keys look at it too (relative_key_query).
    sequence_order (Tensor [B], int32, or None): in which order sequences are best worked on; changes no result.
    Returns: out (Tensor [Tq, A, D], dtype of q); lse (Tensor [A, Tq], fp32; fp64 for fp64 inputs), the natural
        logarithm of the sum of exp of the scores. Where no key is left, out is 0 and lse -inf.
    """
    out, lse, _ = attention_with_probabilities(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, dropout_p, seed, coords_q,
        coords_k, site, causal, bias, head_mask, distance_table, key_term, sequence_order,
    )  # fmt: skip
    return out, lse


def attention_with_probabilities(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor | None, coords_k: Tensor | None,
    site: int, causal: bool, bias: Tensor | None, head_mask: Tensor | None, distance_table: Tensor | None,
    key_term: bool, sequence_order: Tensor | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """`attention_fwd`, and the probabilities as multiplied with v; differentiable by autograd through both.

    Returns: out, lse, and W (Tensor [A, Sq, Sk], dtype of q) of every sequence, in order.
    """
    rules = _Rules(softmax_scale, dropout_p, seed, site, causal, bias, head_mask, distance_table, key_term)
    num_heads, head_dim = v.shape[1:]
    outs = [torch.zeros(0, num_heads, head_dim, dtype=wide_dtype(q.dtype), device=q.device)]
    lses = [torch.zeros(num_heads, 0, dtype=wide_dtype(q.dtype), device=q.device)]
    probabilities = []
    for sequence in _sequences(cu_seqlens_q, cu_seqlens_k, coords_q, coords_k):
        q_, k_, v_ = _per_head(q, sequence.queries), _per_head(k, sequence.keys), _per_head(v, sequence.keys)
        p, lse = _softmax(_scores(q_, k_, sequence, rules))
        w = _times(p, _kept(p, sequence, rules), _head_mask(p, sequence, rules))
        outs.append((w @ v_).transpose(0, 1))
        lses.append(lse)
        probabilities.append(w.to(q.dtype))
    return torch.cat(outs).to(q.dtype), torch.cat(lses, dim=1), probabilities


def attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, dropout_p: float, seed: Tensor | None,
    coords_q: Tensor | None, coords_k: Tensor | None, site: int, causal: bool, bias: Tensor | None,
    head_mask: Tensor | None, distance_table: Tensor | None, key_term: bool, sequence_order: Tensor | None,
    wants_dbias: bool, wants_dhead_mask: bool, wants_ddistance_table: bool, dqkv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of `attention_fwd` through out, P recomputed from q, k and lse.

    dout, out (Tensors [Tq, A, D]); lse (Tensor [A, Tq]); the rest as in forward.
    wants_dbias, wants_dhead_mask, wants_ddistance_table: which gradients to make beside those of q, k and v.
    dqkv (Tensor [T, 3, A, D], contiguous, dtype of q): where to write dq, dk and dv, for q, k and v of the same tokens;
        None: they are new tensors.
    Returns: dq, dk, dv, dbias, dhead_mask, ddistance_table, each in the shape and dtype of its tensor, the last three
        None where not wanted.
    """
    rules = _Rules(softmax_scale, dropout_p, seed, site, causal, bias, head_mask, distance_table, key_term)
    work = wide_dtype(q.dtype)

    def total(x: Tensor | None, wanted: bool) -> Tensor | None:
        return torch.zeros(x.shape, dtype=work, device=x.device) if x is not None and wanted else None

    dq, dk, dv = (torch.zeros(x.shape, dtype=work, device=x.device) for x in (q, k, v))
    dbias, dhead_mask = total(bias, wants_dbias), total(head_mask, wants_dhead_mask)
    ddistance_table = total(distance_table, wants_ddistance_table)
    for sequence in _sequences(cu_seqlens_q, cu_seqlens_k, coords_q, coords_k):
        q_, dout_, out_ = (_per_head(x, sequence.queries) for x in (q, dout, out))
        k_, v_ = (_per_head(x, sequence.keys) for x in (k, v))
        scores = _scores(q_, k_, sequence, rules)
        lse_ = lse[:, sequence.queries, None].to(work)
        p = torch.exp(scores - lse_.masked_fill(lse_ == -torch.inf, 0.0))  # exp(-inf) = 0 where no key is left
        z, m = _kept(p, sequence, rules), _head_mask(p, sequence, rules)

        dv[sequence.keys] = (_times(p, z, m).transpose(1, 2) @ dout_).transpose(0, 1)
        dw = dout_ @ v_.transpose(1, 2)
        if dhead_mask is not None:
            _add_block(dhead_mask, sequence, _times(p, z) * dw)
        dp = _times(dw, z, m)
        delta = (dout_ * out_).sum(-1, keepdim=True)
        ds = p * (dp - delta)
        if dbias is not None:
            _add_block(dbias, sequence, ds)

        ds = ds * softmax_scale
        dq_, dk_ = ds @ k_, ds.transpose(1, 2) @ q_
        if distance_table is not None:
            dq_relative, dk_relative, dtable = relative_scores_bwd(
                ds, q_, k_, distance_table.to(work), sequence.positions_q, sequence.positions_k, key_term,
                wants_ddistance_table,
            )  # fmt: skip
            dq_, dk_ = dq_ + dq_relative, dk_ if dk_relative is None else dk_ + dk_relative
            if ddistance_table is not None and dtable is not None:
                ddistance_table += dtable
        dq[sequence.queries] = dq_.transpose(0, 1)
        dk[sequence.keys] = dk_.transpose(0, 1)
    dbias, dhead_mask, ddistance_table = (
        None if gradient is None or x is None else gradient.to(x.dtype)
        for gradient, x in ((dbias, bias), (dhead_mask, head_mask), (ddistance_table, distance_table))
    )
    dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    if dqkv is not None:
        dqkv.copy_(torch.stack((dq, dk, dv), dim=1))
        dq, dk, dv = dqkv.unbind(1)
    return dq, dk, dv, dbias, dhead_mask, ddistance_table
