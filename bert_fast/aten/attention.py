"""Attention over packed sequences: one C++ routine on the CPU in fp32, tensor arithmetic per sequence elsewhere.

Nothing of size [A, Sq, Sk] outlives a sequence: backward makes the scores again (5 matrix products instead of 4) from
q and k, the C++ routine probabilities from them and lse. That routine keeps the scores of one block of queries
in the cache; `docs/kernels/attention.md` compares it with PyTorch's flash attention for CPUs. It knows no bias, head
mask or relative positions; with these, in other dtypes and on other devices sequences are worked on one by one, here.
Half precision: matrix products in it, everything between them in fp32.
"""

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from bert_fast.aten._native import address, dropout_arguments, routines
from bert_fast.aten.relative_positions import RelativePositions
from bert_fast.reference.dropout import attention_keep_mask, dropout_scale

__all__ = ["attention_bwd", "attention_fwd"]

MAX_NATIVE_HEAD_DIM = 256


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor | None, coords_k: Tensor | None,
    site: int, causal: bool, bias: Tensor | None, head_mask: Tensor | None, distance_table: Tensor | None,
    key_term: bool, sequence_order: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse), as `reference.attention`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=_statistics_dtype(q))
    rules = _Rules(
        softmax_scale, dropout_p, seed, coords_q, coords_k, site, causal, bias, head_mask, distance_table, key_term
    )
    lib = rules.native(q)
    if lib is not None:
        # Copies, where any are made, must live as long as the call: the routine sees addresses.
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
        rules = rules.with_contiguous_coords()
        q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
        lib.attention_fwd(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0), out.data_ptr(),
            lse.data_ptr(), *rules.native_arguments(q, k, cu_seqlens_q, cu_seqlens_k),
        )  # fmt: skip
        return out, lse
    for sequence in rules.sequences(cu_seqlens_q, cu_seqlens_k):
        q_b, k_b, v_b = _heads(q, sequence.q), _heads(k, sequence.k), _heads(v, sequence.k)
        scores = rules.scores(q_b, k_b, sequence, lse.dtype)  # [A, Sq, Sk]
        lse[:, sequence.q] = torch.logsumexp(scores, dim=-1)  # -inf for a row without keys
        probs = _probabilities(scores)
        weights = _times(probs, rules.kept(probs, sequence), rules.head_factors(probs, sequence))
        out[sequence.q] = (weights.to(v.dtype) @ v_b).transpose(0, 1)
    return out, lse


def attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, dropout_p: float, seed: Tensor | None,
    coords_q: Tensor | None, coords_k: Tensor | None, site: int, causal: bool, bias: Tensor | None,
    head_mask: Tensor | None, distance_table: Tensor | None, key_term: bool, sequence_order: Tensor | None,
    wants_dbias: bool, wants_dhead_mask: bool, wants_ddistance_table: bool, dqkv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dbias, dhead_mask, ddistance_table), as `reference.attention`."""
    rules = _Rules(
        softmax_scale, dropout_p, seed, coords_q, coords_k, site, causal, bias, head_mask, distance_table, key_term
    )
    if dqkv is None:
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    else:
        dq, dk, dv = dqkv.unbind(1)
    lib = rules.native(q)
    if lib is not None:
        # Copies, where any are made, must live as long as the call: the routine sees addresses.
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
        rules = rules.with_contiguous_coords()
        q, k, v, dout = (_rows_contiguous(t) for t in (q, k, v, dout.contiguous()))
        lib.attention_bwd(
            dout.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), lse.data_ptr(),
            dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
            dq.stride(0), dk.stride(0), dv.stride(0), *rules.native_arguments(q, k, cu_seqlens_q, cu_seqlens_k),
        )  # fmt: skip
        return dq, dk, dv, None, None, None
    for gradient in (dq, dk, dv):
        gradient.zero_()
    dbias, dhead_mask = _total(bias, wants_dbias, lse), _total(head_mask, wants_dhead_mask, lse)
    dtable = _total(distance_table, wants_ddistance_table, lse)
    for sequence in rules.sequences(cu_seqlens_q, cu_seqlens_k):
        q_b, k_b, v_b = _heads(q, sequence.q), _heads(k, sequence.k), _heads(v, sequence.k)
        dout_b = _heads(dout, sequence.q)
        probs = _probabilities(rules.scores(q_b, k_b, sequence, lse.dtype))
        kept, factors = rules.kept(probs, sequence), rules.head_factors(probs, sequence)
        dweights = (dout_b @ v_b.transpose(1, 2)).to(probs.dtype)
        if dhead_mask is not None:
            _add_block(dhead_mask, sequence, _times(probs, kept) * dweights)
        dv[sequence.k] = (_times(probs, kept, factors).to(v.dtype).transpose(1, 2) @ dout_b).transpose(0, 1)
        dprobs = _times(dweights, kept, factors)
        # From P and dP, not from dout and out: in half precision the rounding of out would not cancel.
        delta = (probs * dprobs).sum(-1, keepdim=True)
        dscores = probs * (dprobs - delta)
        if dbias is not None:
            _add_block(dbias, sequence, dscores)
        dscores = (softmax_scale * dscores).to(q.dtype)
        dq_b, dk_b = dscores @ k_b, dscores.transpose(1, 2) @ q_b
        relative = rules.relative_positions(sequence)
        if relative is not None:
            relative.add_gradients(dscores, q_b, k_b, dq_b, dk_b, dtable)
        dq[sequence.q], dk[sequence.k] = dq_b.transpose(0, 1), dk_b.transpose(0, 1)
    dbias, dhead_mask, dtable = (
        None if gradient is None or x is None else gradient.to(x.dtype)
        for gradient, x in ((dbias, bias), (dhead_mask, head_mask), (dtable, distance_table))
    )
    return dq, dk, dv, dbias, dhead_mask, dtable


def _rows_contiguous(x: Tensor) -> Tensor:
    """x [T, A, D] such that a token's A * D elements stand together; strides between tokens are free."""
    _, of_head, of_element = x.stride()
    return x if of_element == 1 and of_head == x.shape[2] else x.contiguous()


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _heads(x: Tensor, tokens: slice) -> Tensor:
    """One sequence of [T, A, D] as [A, S, D], a view."""
    return x[tokens].transpose(0, 1)


def _probabilities(scores: Tensor) -> Tensor:
    """Softmax over keys, 0 in a row without keys.

    Not exp(scores - lse): where a mask pushed a whole row to -1e9, adding log(number of keys) is lost in rounding.
    """
    return torch.softmax(scores, dim=-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)


def _times(x: Tensor, *factors: Tensor | None) -> Tensor:
    for factor in factors:
        x = x if factor is None else x * factor
    return x


def _total(x: Tensor | None, is_wanted: bool, lse: Tensor) -> Tensor | None:
    """Zeros of x's shape in the dtype of the statistics, to add a gradient up in; None where it is not wanted."""
    return torch.zeros(x.shape, dtype=lse.dtype, device=x.device) if x is not None and is_wanted else None


class _Sequence(NamedTuple):
    """Where one sequence's queries and keys stand in the packed tensors, and in the original batch."""

    q: slice
    k: slice
    row: int
    positions_q: slice | Tensor  # a slice where there are no holes: blocks of a bias are then views
    positions_k: slice | Tensor


def _block_of(batched: Tensor, sequence: _Sequence) -> tuple[Tensor, tuple[slice | Tensor, ...]]:
    """(x, index) such that x[index] is the sequence's block [A or 1, Sq or 1, Sk or 1] of [B, A, Sq, Sk]; x a view."""
    rows, _, queries, keys = batched.shape
    of_queries = sequence.positions_q if queries > 1 else slice(None)
    of_keys = sequence.positions_k if keys > 1 else slice(None)
    if isinstance(of_queries, Tensor) and isinstance(of_keys, Tensor):
        of_queries = of_queries[:, None]
    return batched[sequence.row if rows > 1 else 0], (slice(None), of_queries, of_keys)


def _add_block(total: Tensor, sequence: _Sequence, block: Tensor) -> None:
    """Adds block [A, Sq, Sk], summed over the dimensions that `total` broadcasts, in its place in `total`."""
    if not block.numel():
        return
    x, index = _block_of(total, sequence)
    x[index] += block.sum_to_size([size if full > 1 else 1 for size, full in zip(block.shape, x.shape, strict=True)])


class _Rules(NamedTuple):
    """What one call does to its scores and probabilities; arguments of `attention_fwd`."""

    softmax_scale: float
    dropout_p: float
    seed: Tensor | None
    coords_q: Tensor | None
    coords_k: Tensor | None
    site: int
    causal: bool
    bias: Tensor | None
    head_mask: Tensor | None
    distance_table: Tensor | None
    key_term: bool

    @property
    def looks_up(self) -> bool:
        """Whether tokens are looked up under their names in the original batch."""
        return self.bias is not None or self.head_mask is not None or self.distance_table is not None

    def native(self, q: Tensor) -> ModuleType | None:
        """The extension if its routine can run this call, else None."""
        return None if q.shape[2] > MAX_NATIVE_HEAD_DIM or self.looks_up else routines(q)

    def with_contiguous_coords(self) -> "_Rules":
        """The same with coords that an address describes."""
        if self.coords_q is None and self.coords_k is None:
            return self
        coords_q = None if self.coords_q is None else self.coords_q.contiguous()
        return self._replace(coords_q=coords_q, coords_k=None if self.coords_k is None else self.coords_k.contiguous())

    def native_arguments(self, q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple:
        """The C++ routines' arguments from cu_q on."""
        num_tokens, num_heads, head_dim = q.shape
        return (
            cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr(), cu_seqlens_q.shape[0] - 1, num_tokens, k.shape[0],
            num_heads, head_dim, self.softmax_scale, address(self.coords_q), address(self.coords_k),
            *dropout_arguments(self.dropout_p, self.seed, self.site), self.causal, num_tokens, torch.get_num_threads(),
        )  # fmt: skip

    def sequences(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[_Sequence]:
        """Every sequence that has queries."""
        spans = (itertools.pairwise(edges.tolist()) for edges in (cu_seqlens_q, cu_seqlens_k))
        tokens = [(slice(*q), slice(*k)) for q, k in zip(*spans, strict=True) if q[1] > q[0]]
        if not self.looks_up:
            return (_Sequence(q, k, 0, slice(None), slice(None)) for q, k in tokens)
        assert self.coords_q is not None and self.coords_k is not None
        rows = self.coords_q[[q.start for q, _ in tokens], 0].tolist()
        positions_q = _positions(self.coords_q, [q for q, _ in tokens])
        positions_k = _positions(self.coords_k, [k for _, k in tokens])
        return (
            _Sequence(*spans, row, *positions)
            for spans, row, *positions in zip(tokens, rows, positions_q, positions_k, strict=True)
        )

    def scores(self, q: Tensor, k: Tensor, sequence: _Sequence, dtype: torch.dtype) -> Tensor:
        """Scaled and masked scores [A, Sq, Sk] of one sequence."""
        scores = (q @ k.transpose(1, 2)).to(dtype)
        relative = self.relative_positions(sequence)
        if relative is not None:
            relative.add_scores(scores, q, k)
        scores = scores * self.softmax_scale
        if self.bias is not None and scores.numel():
            block, index = _block_of(self.bias, sequence)
            scores = scores + block[index].to(dtype)
        if self.causal:
            assert self.coords_q is not None and self.coords_k is not None
            is_later = self.coords_k[sequence.k, 1] > self.coords_q[sequence.q, 1:]  # [Sq, Sk]
            scores = scores.masked_fill(is_later, -torch.inf)
        return scores

    def relative_positions(self, sequence: _Sequence) -> RelativePositions | None:
        """Of one sequence, None where there are none or nothing to score."""
        if self.distance_table is None or sequence.k.start == sequence.k.stop:
            return None
        assert self.coords_q is not None and self.coords_k is not None
        positions = self.coords_q[sequence.q, 1], self.coords_k[sequence.k, 1]
        return RelativePositions(self.distance_table, *positions, self.key_term)

    def kept(self, x: Tensor, sequence: _Sequence) -> Tensor | None:
        """What dropout multiplies x [A, Sq, Sk] of one sequence by; None without dropout."""
        if self.dropout_p == 0.0:
            return None
        assert self.seed is not None and self.coords_q is not None
        keep = attention_keep_mask(self.seed, self.site, self.coords_q[sequence.q], x.shape[-1], len(x), self.dropout_p)
        return keep.to(x.dtype) * dropout_scale(self.dropout_p)

    def head_factors(self, x: Tensor, sequence: _Sequence) -> Tensor | None:
        """What the head mask multiplies x [A, Sq, Sk] of one sequence by; None without one."""
        if self.head_mask is None or not x.numel():
            return None
        block, index = _block_of(self.head_mask, sequence)
        return block[index].to(x.dtype)


def _positions(coords: Tensor, spans: list[slice]) -> list[slice | Tensor]:
    """Every span's positions: as a slice where they follow one another, which their ends tell as they ascend."""
    ends = [token for span in spans for token in (span.start, max(span.start, span.stop - 1))]
    # An empty span at the very end has no token to ask.
    edges = coords[[min(token, len(coords) - 1) for token in ends], 1].tolist() if len(coords) else [0] * len(ends)
    positions: list[slice | Tensor] = []
    for span, first, last in zip(spans, edges[::2], edges[1::2], strict=True):
        length = span.stop - span.start
        is_dense = last - first == length - 1
        positions.append(slice(first, first + length) if is_dense or not length else coords[span, 1].long())
    return positions
