"""Attention over packed sequences: library matrix products per sequence, one fused softmax-and-dropout pass between them.

Nothing of size [A, Sq, Sk] outlives a sequence: backward makes the scores again (5 matrix products instead of 4) from q,
k and lse, so 4 tensors [T, A, D] and one [A, T] are saved, and the working set of one sequence stays in the cache.
"""

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
    rows = _RowOps(q, lse, softmax_scale, dropout_p, seed, coords_q, coords_k, site, causal)
    for span_q, span_k in _spans(cu_seqlens_q, cu_seqlens_k):
        # [A, Sq, D] x [A, D, Sk] -> [A, Sq, Sk]
        probs = rows.softmax_dropout(_matmul(_heads(q, span_q), _heads(k, span_k).transpose(1, 2)), span_q, span_k)
        out[slice(*span_q)] = _matmul(probs, _heads(v, span_k)).transpose(0, 1)
    return out, lse


def attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor, coords_k: Tensor, site: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), as `reference.attention`."""
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    # delta = rowsum(dout * out) = rowsum(P * dP): the term that the softmax's normalisation takes back. [A, Tq]
    delta = (dout.to(lse.dtype) * out).sum(-1).t().contiguous()
    rows = _RowOps(q, lse, softmax_scale, dropout_p, seed, coords_q, coords_k, site, causal)
    for span_q, span_k in _spans(cu_seqlens_q, cu_seqlens_k):
        q_b, do_b, k_b, v_b = _heads(q, span_q), _heads(dout, span_q), _heads(k, span_k), _heads(v, span_k)
        scores = _matmul(q_b, k_b.transpose(1, 2))
        dprobs = _matmul(do_b, v_b.transpose(1, 2))
        probs, dscores = rows.softmax_dropout_bwd(scores, dprobs, delta, span_q, span_k)
        dv[slice(*span_k)] = _matmul(probs.transpose(1, 2), do_b).transpose(0, 1)
        dq[slice(*span_q)] = _matmul(dscores, k_b).transpose(0, 1)
        dk[slice(*span_k)] = _matmul(dscores.transpose(1, 2), q_b).transpose(0, 1)
    return dq, dk, dv


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _spans(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """((start, end) of the queries, of the keys) of every sequence that has queries."""
    edges_q, edges_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    spans = zip(zip(edges_q, edges_q[1:], strict=False), zip(edges_k, edges_k[1:], strict=False), strict=True)
    return [(span_q, span_k) for span_q, span_k in spans if span_q[1] > span_q[0]]


def _heads(x: Tensor, span: tuple[int, int]) -> Tensor:
    """One sequence of [T, A, D] as [A, S, D], a view."""
    return x[span[0] : span[1]].transpose(0, 1)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b)


class _RowOps:
    """Softmax and dropout of one call's score rows, in C++ where it can be, else by tensor arithmetic."""

    def __init__(
        self, q: Tensor, lse: Tensor, softmax_scale: float, dropout_p: float, seed: Tensor | None,
        coords_q: Tensor, coords_k: Tensor, site: int, causal: bool,
    ) -> None:  # fmt: skip
        self.lib = routines(q)
        self.lse, self.softmax_scale, self.causal = lse, softmax_scale, causal
        self.dropout_p, self.seed, self.site = dropout_p, seed, site
        self.coords_q, self.coords_k = coords_q, coords_k
        self.native_dropout = dropout_arguments(dropout_p, seed, site) if self.lib is not None else None

    def softmax_dropout(self, scores: Tensor, span_q: tuple[int, int], span_k: tuple[int, int]) -> Tensor:
        """Scores [A, Sq, Sk] to dropped probabilities (in place where possible); writes lse."""
        if self.lib is not None and scores.numel():
            self.lib.softmax_dropout_fwd(scores.data_ptr(), self.lse.data_ptr(), *self._native_arguments(scores, span_q, span_k))
            return scores
        scaled = self._scaled(scores, span_q, span_k)
        lse = torch.logsumexp(scaled, dim=-1)  # -inf for a row without keys
        self.lse[:, slice(*span_q)] = lse
        probs = self._probabilities(scaled, lse)
        return self._drop(probs, span_q, span_k).to(scores.dtype)

    def softmax_dropout_bwd(
        self, scores: Tensor, dprobs: Tensor, delta: Tensor, span_q: tuple[int, int], span_k: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """(dropped probabilities, d(unscaled scores)), in place where possible."""
        if self.lib is not None and scores.numel():
            self.lib.softmax_dropout_bwd(
                scores.data_ptr(), dprobs.data_ptr(), self.lse.data_ptr(), delta.data_ptr(),
                *self._native_arguments(scores, span_q, span_k),
            )  # fmt: skip
            return scores, dprobs
        probs = self._probabilities(self._scaled(scores, span_q, span_k), self.lse[:, slice(*span_q)])
        dprobs = self._drop(dprobs.to(probs.dtype), span_q, span_k)
        dscores = self.softmax_scale * probs * (dprobs - delta[:, slice(*span_q)].unsqueeze(-1))
        return self._drop(probs, span_q, span_k).to(scores.dtype), dscores.to(scores.dtype)

    def _native_arguments(self, scores: Tensor, span_q: tuple[int, int], span_k: tuple[int, int]) -> tuple:
        num_heads, len_q, len_k = scores.shape
        assert self.native_dropout is not None
        return (
            1, num_heads, len_q, len_k, [span_q[0]], [len_q], [span_k[0]], [len_k], self.lse.shape[1],
            self.softmax_scale, address(self.coords_q), address(self.coords_k), *self.native_dropout, self.causal,
            torch.get_num_threads(),
        )  # fmt: skip

    def _scaled(self, scores: Tensor, span_q: tuple[int, int], span_k: tuple[int, int]) -> Tensor:
        scaled = scores.to(self.lse.dtype) * self.softmax_scale
        if self.causal:
            later = self.coords_k[slice(*span_k), 1] > self.coords_q[slice(*span_q), 1:]
            scaled = scaled.masked_fill(later, -torch.inf)
        return scaled

    def _probabilities(self, scaled: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(scaled - lse.unsqueeze(-1).masked_fill(lse.isinf().unsqueeze(-1), 0.0))

    def _drop(self, x: Tensor, span_q: tuple[int, int], span_k: tuple[int, int]) -> Tensor:
        if self.dropout_p == 0.0 or self.seed is None:
            return x
        keep = attention_keep_mask(
            self.seed, self.site, self.coords_q[slice(*span_q)], self.coords_k[slice(*span_k), 1], len(x), self.dropout_p
        )
        return x * keep * dropout_scale(self.dropout_p)
