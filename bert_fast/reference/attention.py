"""Multi-head attention of a ragged batch, one sequence after the other, as in the textbook.

For one sequence and head, with queries Q [Sq, D], keys K and values V [Sk, D]:

    S   = softmax_scale * (Q K^T + R) + bias        R: relative_positions.py; entries that a mask removes are -inf
    lse = log sum exp(S)                            over keys
    P   = exp(S - lse)                              softmax; 0 where no key is left
    W   = P * Z                                     Z = keep * scale, dropout's mask
    O   = W V

Backward (Dao et al. 2022, arXiv:2205.14135, appendix B.2):

    dV    = W^T dO
    dW    = dO V^T
    dP    = dW * Z
    delta = rowsum(dO * O) = rowsum(P * dP)
    dS    = P * (dP - delta)
    dbias = dS                                      summed to the shape of bias
    dQ    = softmax_scale * dS K,   dK = softmax_scale * dS^T Q,   and through R

A query that no key is left for attends to nothing: O = 0, lse = -inf, and every gradient through it is 0. (Hugging Face
adds a large negative number to such a row and so averages over the very keys that were masked.)

A token is named by (row, position): its sequence's index in the original batch, its index in that sequence. Causal
order, biases and distances are looked up under these names, so padding that was removed changes nothing.
Dropout names queries alike, but keys by their ordinal in the kept sequence (dropout.py).

Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2. Precision: fp32 throughout (fp64 for fp64 inputs).
"""

from collections.abc import Iterator, Set
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.dropout import attention_keep_mask, dropout_scale
from bert_fast.reference.precision import wide, wide_dtype
from bert_fast.reference.relative_positions import relative_scores_bwd, relative_scores_fwd


class Attention(NamedTuple):
    """The arguments, complete: tokens are packed, and of any strides."""

    q: Annotated[Tensor, "x Tq A+ D+"]
    k: Annotated[Tensor, "x Tk A D"]
    v: Annotated[Tensor, "x Tk A D"]
    cu_seqlens_q: Annotated[Tensor, "int32 O+"]  # sequence b owns tokens cu_seqlens[b] .. cu_seqlens[b + 1] - 1
    cu_seqlens_k: Annotated[Tensor, "int32 O"]
    max_seqlen_q: int  # at least the longest lengths; not needed here, other back-ends size their grids by them
    max_seqlen_k: int
    softmax_scale: float
    dropout_p: float  # probability of dropping
    seed: Annotated[Tensor | None, "int64 1"]  # with site it names the mask; neither is needed without dropout
    # (row, position) of every token; positions rise within a sequence, with holes where padding stood. None counts the
    # tokens of a sequence from 0; other back-ends want coords_q with dropout, and both with causal, bias and tables.
    coords_q: Annotated[Tensor | None, "int32 Tq 2"]
    coords_k: Annotated[Tensor | None, "int32 Tk 2"]
    site: int
    causal: bool  # a query sees the keys up to its own position only
    # Broadcastable to [B, A, Sq, Sk]; B counts the original batch's rows, Sq and Sk reach beyond the largest position.
    bias: Annotated[Tensor | None, "f _ _ _ _"]  # added to the scaled scores; -inf removes a key from a query
    # Tables of relative positions, [2M - 1, A, D], with the same M: what queries and what keys are multiplied with.
    relative_keys: Annotated[Tensor | None, "f _ A D"]
    relative_queries: Annotated[Tensor | None, "f _ A D"]
    sequence_order: Annotated[Tensor | None, "int32 _"]  # [B], in which sequences are best worked on; changes no result
    keeps: bool = False  # whether forward may store dropout's mask, since backward will be called

    @property
    def has_tables(self) -> bool:
        """Whether there are relative positions."""
        return self.relative_keys is not None or self.relative_queries is not None

    @property
    def has_extras(self) -> bool:
        """Whether something is looked up under the names of queries and keys."""
        return self.bias is not None or self.has_tables


class AttentionQkv(NamedTuple):
    """`Attention` of the parts of one tensor, which are queries and keys of the same sequences."""

    qkv: Annotated[Tensor, "x T 3 A+ D+"]
    cu_seqlens: Annotated[Tensor, "int32 O+"]
    max_seqlen: int
    softmax_scale: float
    dropout_p: float
    seed: Annotated[Tensor | None, "int64 1"]
    coords: Annotated[Tensor | None, "int32 T 2"]
    site: int
    causal: bool
    bias: Annotated[Tensor | None, "f _ _ _ _"]
    relative_keys: Annotated[Tensor | None, "f _ A D"]
    relative_queries: Annotated[Tensor | None, "f _ A D"]
    sequence_order: Annotated[Tensor | None, "int32 _"]
    keeps: bool = False

    @property
    def has_extras(self) -> bool:
        """As of `Attention`."""
        return self.bias is not None or self.relative_keys is not None or self.relative_queries is not None

    @property
    def of_three(self) -> Attention:
        """The arguments as back-ends take them."""
        q, k, v = self.qkv.unbind(1)
        coords_k = self.coords if self.causal or self.has_extras else None
        _, cu_seqlens, max_seqlen, softmax_scale, dropout_p, seed, coords, *rest = self
        return Attention(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            softmax_scale,
            dropout_p,
            seed,
            coords,
            coords_k,
            *rest,  # type: ignore[arg-type]
        )


def stored_mask_shape(a: Attention) -> tuple[int, int, int]:
    """[A, strips, words] of a stored mask, int32: a bit for each query, head and key.

    A strip is 16 queries of a sequence. Those of sequence b begin at cu_seqlens_q[b] // 16 + b, which leaves room for
    all of them. 64 keys take 32 words of a strip; there are as many as the longest sequence has. Which bit is whose is
    for the back-end to say.
    """
    num_queries, num_heads, _ = a.q.shape
    num_sequences = a.cu_seqlens_q.shape[0] - 1
    return num_heads, num_queries // 16 + num_sequences, (a.max_seqlen_k + 63) // 64 * 32


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


def _sequences(a: Attention) -> Iterator[_Sequence]:
    """The sequences in order."""
    coords_q = _counted(a.cu_seqlens_q) if a.coords_q is None else a.coords_q
    coords_k = _counted(a.cu_seqlens_k) if a.coords_k is None else a.coords_k
    bounds_q, bounds_k = a.cu_seqlens_q.tolist(), a.cu_seqlens_k.tolist()
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


def _scores(q: Tensor, k: Tensor, sequence: _Sequence, a: Attention) -> Tensor:
    """S [A, Sq, Sk] of one sequence, for wide q [A, Sq, D] and k [A, Sk, D]."""
    scores = q @ k.transpose(1, 2)
    if a.has_tables:
        scores = scores + relative_scores_fwd(q, k, *_tables(a, q.dtype), sequence.positions_q, sequence.positions_k)
    scores = scores * a.softmax_scale
    if a.bias is not None and scores.numel():
        scores = scores + a.bias[_index_of(a.bias, sequence)].to(q.dtype)
    if a.causal:
        later = sequence.positions_k[None, :] > sequence.positions_q[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _tables(a: Attention, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """relative_keys and relative_queries in this dtype."""
    keys, queries = (None if x is None else x.to(dtype) for x in (a.relative_keys, a.relative_queries))
    return keys, queries


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


def _kept(p: Tensor, sequence: _Sequence, a: Attention) -> Tensor | None:
    """Z [A, Sq, Sk] of one sequence, None without dropout."""
    if a.dropout_p == 0.0:
        return None
    assert a.seed is not None
    num_heads, _, num_keys = p.shape
    keep = attention_keep_mask(a.seed, a.site, sequence.coords_q, num_keys, num_heads, a.dropout_p)
    return keep.to(p.dtype) * dropout_scale(a.dropout_p)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _per_head(x: Tensor, tokens: slice) -> Tensor:
    """[A, S, D] of one sequence, wide, from packed [T, A, D]."""
    return wide(x[tokens].transpose(0, 1))


def attention_fwd(a: Attention) -> tuple[Tensor, Tensor, None]:
    """Attention within every sequence, with everything BERT ever had.

    Returns: out (Tensor [Tq, A, D], dtype of q); lse (Tensor [A, Tq], fp32; fp64 for fp64 inputs), the natural
        logarithm of the sum of exp of the scores. Where no key is left, out is 0 and lse -inf. And the mask for
        backward, None: here it is always drawn again.
    """
    out, lse, _ = attention_with_probabilities(a)
    return out, lse, None


def attention_with_probabilities(a: Attention) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`attention_fwd`, and the probabilities as multiplied with v; differentiable by autograd through both.

    Returns: out, lse, and W (Tensor [A, Sq, Sk], dtype of q) of every sequence, in order.
    """
    num_heads, head_dim = a.v.shape[1:]
    outs = [torch.zeros(0, num_heads, head_dim, dtype=wide_dtype(a.q.dtype), device=a.q.device)]
    lses = [torch.zeros(num_heads, 0, dtype=wide_dtype(a.q.dtype), device=a.q.device)]
    probabilities = []
    for sequence in _sequences(a):
        q, k, v = _per_head(a.q, sequence.queries), _per_head(a.k, sequence.keys), _per_head(a.v, sequence.keys)
        p, lse = _softmax(_scores(q, k, sequence, a))
        w = _times(p, _kept(p, sequence, a))
        outs.append((w @ v).transpose(0, 1))
        lses.append(lse)
        probabilities.append(w.to(a.q.dtype))
    return torch.cat(outs).to(a.q.dtype), torch.cat(lses, dim=1), probabilities


def attention_bwd(
    a: Attention, dout: Tensor, out: Tensor, lse: Tensor, mask: None, wants: Set[str], dqkv: Tensor | None = None
) -> dict[str, Tensor]:
    """Gradients of `attention_fwd` through out by name, of q, k, v and, where wanted, bias, relative_keys and
    relative_queries.

    P is recomputed from q, k and lse.
    dout, out (Tensors [Tq, A, D]); lse (Tensor [A, Tq]).
    dqkv (Tensor [T, 3, A, D], contiguous, dtype of q): where to write those of q, k and v, which are of the same tokens
        then; None: they are new tensors.
    Each is of the shape and dtype of its tensor.
    """
    work = wide_dtype(a.q.dtype)
    made = {
        name: torch.zeros(x.shape, dtype=work, device=x.device)
        for name in ("q", "k", "v", "bias", "relative_keys", "relative_queries")
        if (x := getattr(a, name)) is not None and (name in "qkv" or name in wants)
    }
    for sequence in _sequences(a):
        q, dout_, out_ = (_per_head(x, sequence.queries) for x in (a.q, dout, out))
        k, v = (_per_head(x, sequence.keys) for x in (a.k, a.v))
        scores = _scores(q, k, sequence, a)
        lse_ = lse[:, sequence.queries, None].to(work)
        p = torch.exp(scores - lse_.masked_fill(lse_ == -torch.inf, 0.0))  # exp(-inf) = 0 where no key is left
        z = _kept(p, sequence, a)

        made["v"][sequence.keys] = (_times(p, z).transpose(1, 2) @ dout_).transpose(0, 1)
        dp = _times(dout_ @ v.transpose(1, 2), z)
        delta = (dout_ * out_).sum(-1, keepdim=True)
        ds = p * (dp - delta)
        if "bias" in made:
            _add_block(made["bias"], sequence, ds)

        ds = ds * a.softmax_scale
        dq, dk = ds @ k, ds.transpose(1, 2) @ q
        if a.has_tables:
            relative = relative_scores_bwd(
                ds, q, k, *_tables(a, work), sequence.positions_q, sequence.positions_k, made.keys()
            )
            dq, dk = dq + relative.pop("q", 0.0), dk + relative.pop("k", 0.0)
            for name, gradient in relative.items():
                made[name] += gradient
        made["q"][sequence.queries] = dq.transpose(0, 1)
        made["k"][sequence.keys] = dk.transpose(0, 1)
    made = {name: gradient.to(getattr(a, name).dtype) for name, gradient in made.items()}
    if dqkv is not None:
        dqkv.copy_(torch.stack((made["q"], made["k"], made["v"]), dim=1))
        made |= zip("qkv", dqkv.unbind(1), strict=True)
    return made
