"""Attention over packed sequences: matrix products per sequence, one fused pass of softmax and dropout between.

Nothing of size [A, Sq, Sk] outlives a sequence: backward makes the scores again (5 matrix products instead of 4) from
q, k and lse, so 4 tensors [T, A, D] and one [A, T] are saved, and the working set of one sequence stays in the cache.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from bert_fast.aten._native import address, dropout_arguments, routines
from bert_fast.reference.dropout import attention_keep_mask, dropout_scale

__all__ = ["attention_bwd", "attention_fwd"]


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor, coords_k: Tensor, site: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse), as `reference.attention`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=_statistics_dtype(q))
    rows = _RowOps(q, lse, cu_seqlens_q, cu_seqlens_k, softmax_scale, dropout_p, seed, coords_q, coords_k, site, causal)
    for sequence in rows.sequences:
        q_b, k_b, v_b = _heads(q, sequence.q), _heads(k, sequence.k), _heads(v, sequence.k)
        # [A, Sq, D] x [A, D, Sk] -> [A, Sq, Sk]
        probs = rows.softmax_dropout(torch.bmm(q_b, k_b.transpose(1, 2)), sequence)
        out[sequence.q] = torch.bmm(probs, v_b).transpose(0, 1)
    return out, lse


def attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor, coords_k: Tensor, site: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), as `reference.attention`."""
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    rows = _RowOps(q, lse, cu_seqlens_q, cu_seqlens_k, softmax_scale, dropout_p, seed, coords_q, coords_k, site, causal)
    delta = rows.native_delta(dout, out)
    for sequence in rows.sequences:
        q_b, k_b, v_b = _heads(q, sequence.q), _heads(k, sequence.k), _heads(v, sequence.k)
        dout_b = _heads(dout, sequence.q)
        scores = torch.bmm(q_b, k_b.transpose(1, 2))
        dprobs = torch.bmm(dout_b, v_b.transpose(1, 2))
        probs, dscores = rows.softmax_dropout_bwd(scores, dprobs, delta, sequence)
        dv[sequence.k] = torch.bmm(probs.transpose(1, 2), dout_b).transpose(0, 1)
        dq[sequence.q] = torch.bmm(dscores, k_b).transpose(0, 1)
        dk[sequence.k] = torch.bmm(dscores.transpose(1, 2), q_b).transpose(0, 1)
    return dq, dk, dv


class _Sequence(NamedTuple):
    """One sequence of the batch: its number, and where its queries and keys stand."""

    number: int
    q: slice
    k: slice


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[_Sequence]:
    """Every sequence that has queries."""
    spans = (itertools.pairwise(edges.tolist()) for edges in (cu_seqlens_q, cu_seqlens_k))
    return [
        _Sequence(index, slice(*span_q), slice(*span_k))
        for index, (span_q, span_k) in enumerate(zip(*spans, strict=True))
        if span_q[1] > span_q[0]
    ]


def _heads(x: Tensor, tokens: slice) -> Tensor:
    """One sequence of [T, A, D] as [A, S, D], a view."""
    return x[tokens].transpose(0, 1)


class _RowOps:
    """Softmax and dropout of one call's score rows, in C++ where it can be, else by tensor arithmetic."""

    def __init__(
        self, q: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, softmax_scale: float,
        dropout_p: float, seed: Tensor | None, coords_q: Tensor, coords_k: Tensor, site: int, causal: bool,
    ) -> None:  # fmt: skip
        self.sequences = _sequences(cu_seqlens_q, cu_seqlens_k)
        self.lse, self.softmax_scale, self.causal = lse, softmax_scale, causal
        self.dropout_p, self.seed, self.site = dropout_p, seed, site
        self.coords_q, self.coords_k = coords_q, coords_k
        self.lib = routines(q)
        if self.lib is not None:
            self.starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()  # int32; element b is sequence b's
            self.lengths = self.starts[0].diff(), self.starts[1].diff()
            self.dropout_arguments = dropout_arguments(dropout_p, seed, site)

    def softmax_dropout(self, scores: Tensor, sequence: _Sequence) -> Tensor:
        """Scores [A, Sq, Sk] to dropped probabilities (in place where possible); writes lse."""
        if self.lib is not None and scores.numel():
            self.lib.softmax_dropout_fwd(
                scores.data_ptr(), self.lse.data_ptr(), *self._native_arguments(scores, sequence)
            )
            return scores
        scaled = self._scaled(scores, sequence)
        lse = torch.logsumexp(scaled, dim=-1)  # -inf for a row without keys
        self.lse[:, sequence.q] = lse
        probs = self._probabilities(scaled, lse)
        return self._drop(probs, sequence).to(scores.dtype)

    def softmax_dropout_bwd(
        self, scores: Tensor, dprobs: Tensor, delta: Tensor | None, sequence: _Sequence
    ) -> tuple[Tensor, Tensor]:
        """(dropped probabilities, d(unscaled scores)), in place where possible; delta is `native_delta`'s."""
        if self.lib is not None and delta is not None and scores.numel():
            self.lib.softmax_dropout_bwd(
                scores.data_ptr(), dprobs.data_ptr(), self.lse.data_ptr(), delta.data_ptr(),
                *self._native_arguments(scores, sequence),
            )  # fmt: skip
            return scores, dprobs
        probs = self._probabilities(self._scaled(scores, sequence), self.lse[:, sequence.q])
        dprobs = self._drop(dprobs.to(probs.dtype), sequence)
        # From P and dP, not from dout and out: in half precision the rounding of out would not cancel.
        delta = (probs * dprobs).sum(-1, keepdim=True)
        dscores = self.softmax_scale * probs * (dprobs - delta)
        return self._drop(probs, sequence).to(scores.dtype), dscores.to(scores.dtype)

    def native_delta(self, dout: Tensor, out: Tensor) -> Tensor | None:
        """rowsum(dout * out) = rowsum(P * dP), what softmax's normalisation takes back: [A, Tq]; None if not native."""
        return None if self.lib is None else (dout * out).sum(-1).t().contiguous()

    def _native_arguments(self, scores: Tensor, sequence: _Sequence) -> tuple:
        num_heads, len_q, len_k = scores.shape
        offset = 4 * sequence.number  # bytes into the int32 arrays
        spans = (
            array.data_ptr() + offset for array in (self.starts[0], self.lengths[0], self.starts[1], self.lengths[1])
        )
        return (
            1, num_heads, len_q, len_k, *spans, self.lse.shape[1], self.softmax_scale, address(self.coords_q),
            address(self.coords_k), *self.dropout_arguments, self.causal, torch.get_num_threads(),
        )  # fmt: skip

    def _scaled(self, scores: Tensor, sequence: _Sequence) -> Tensor:
        scaled = scores.to(self.lse.dtype) * self.softmax_scale
        if self.causal:
            later = self.coords_k[sequence.k, 1] > self.coords_q[sequence.q, 1:]
            scaled = scaled.masked_fill(later, -torch.inf)
        return scaled

    def _probabilities(self, scaled: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(scaled - lse.unsqueeze(-1).masked_fill(lse.isinf().unsqueeze(-1), 0.0))

    def _drop(self, x: Tensor, sequence: _Sequence) -> Tensor:
        if self.dropout_p == 0.0 or self.seed is None:
            return x
        keep = attention_keep_mask(
            self.seed, self.site, self.coords_q[sequence.q], self.coords_k[sequence.k, 1], len(x), self.dropout_p
        )
        return x * keep * dropout_scale(self.dropout_p)
