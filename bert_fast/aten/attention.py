"""Attention over packed sequences: one C++ routine on the CPU in fp32, tensor arithmetic per sequence elsewhere.

Nothing of size [A, Sq, Sk] outlives a sequence: backward makes the scores again (5 matrix products instead of 4) from
q, k and lse, so 4 tensors [T, A, D] and one [A, T] are saved. The C++ routine keeps the scores of one block of queries
in the cache; `docs/kernels/attention.md` compares it with PyTorch's flash attention for CPUs.
"""

import itertools
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from bert_fast.aten._native import address, dropout_arguments, routines
from bert_fast.reference.dropout import attention_keep_mask, dropout_scale

__all__ = ["attention_bwd", "attention_fwd"]

MAX_NATIVE_HEAD_DIM = 256


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor | None, coords_k: Tensor | None,
    site: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse), as `reference.attention`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=_statistics_dtype(q))
    rows = _Rows(softmax_scale, dropout_p, seed, coords_q, coords_k, site, causal)
    lib = _native_attention(q)
    if lib is not None:
        # Copies, where any are made, must live as long as the call: the routine sees addresses.
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
        rows = rows.with_contiguous_coords()
        q, k, v = (_rows_contiguous(t) for t in (q, k, v))
        lib.attention_fwd(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0), out.data_ptr(),
            lse.data_ptr(), *rows.native_arguments(q, cu_seqlens_q, cu_seqlens_k),
        )  # fmt: skip
        return out, lse
    for sequence in _sequences(cu_seqlens_q, cu_seqlens_k):
        q_b, k_b, v_b = _heads(q, sequence.q), _heads(k, sequence.k), _heads(v, sequence.k)
        scores = rows.scores(q_b, k_b, sequence, lse.dtype)  # [A, Sq, Sk]
        lse[:, sequence.q] = torch.logsumexp(scores, dim=-1)  # -inf for a row without keys
        probs = rows.drop(_probabilities(scores, lse[:, sequence.q]), sequence)
        out[sequence.q] = (probs.to(v.dtype) @ v_b).transpose(0, 1)
    return out, lse


def attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor | None, coords_k: Tensor | None,
    site: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), as `reference.attention`."""
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    rows = _Rows(softmax_scale, dropout_p, seed, coords_q, coords_k, site, causal)
    lib = _native_attention(q)
    if lib is not None:
        # Copies, where any are made, must live as long as the call: the routine sees addresses.
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
        rows = rows.with_contiguous_coords()
        q, k, v, dout = (_rows_contiguous(t) for t in (q, k, v, dout.contiguous()))
        lib.attention_bwd(
            dout.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(),
            dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
            dq.stride(0), dk.stride(0), dv.stride(0), *rows.native_arguments(q, cu_seqlens_q, cu_seqlens_k),
        )  # fmt: skip
        return dq, dk, dv
    for sequence in _sequences(cu_seqlens_q, cu_seqlens_k):
        q_b, k_b, v_b = _heads(q, sequence.q), _heads(k, sequence.k), _heads(v, sequence.k)
        dout_b = _heads(dout, sequence.q)
        probs = _probabilities(rows.scores(q_b, k_b, sequence, lse.dtype), lse[:, sequence.q])
        dropped = rows.drop(probs, sequence).to(v.dtype)
        dprobs = rows.drop((dout_b @ v_b.transpose(1, 2)).to(probs.dtype), sequence)
        # From P and dP, not from dout and out: in half precision the rounding of out would not cancel.
        delta = (probs * dprobs).sum(-1, keepdim=True)
        dscores = (softmax_scale * probs * (dprobs - delta)).to(q.dtype)
        dv[sequence.k] = (dropped.transpose(1, 2) @ dout_b).transpose(0, 1)
        dq[sequence.q] = (dscores @ k_b).transpose(0, 1)
        dk[sequence.k] = (dscores.transpose(1, 2) @ q_b).transpose(0, 1)
    return dq, dk, dv


def _native_attention(q: Tensor) -> ModuleType | None:
    """The extension if its routine takes this head size, else None."""
    is_wide_enough = q.shape[2] % 16 == 0 and q.shape[2] <= MAX_NATIVE_HEAD_DIM
    return routines(q) if is_wide_enough else None


def _rows_contiguous(x: Tensor) -> Tensor:
    """x [T, A, D] such that a token's A * D elements stand together; strides between tokens are free."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Sequence(NamedTuple):
    """Where one sequence's queries and keys stand."""

    q: slice
    k: slice


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[_Sequence]:
    """Every sequence that has queries."""
    spans = (itertools.pairwise(edges.tolist()) for edges in (cu_seqlens_q, cu_seqlens_k))
    return [
        _Sequence(slice(*span_q), slice(*span_k))
        for span_q, span_k in zip(*spans, strict=True)
        if span_q[1] > span_q[0]
    ]


def _heads(x: Tensor, tokens: slice) -> Tensor:
    """One sequence of [T, A, D] as [A, S, D], a view."""
    return x[tokens].transpose(0, 1)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in a row without keys."""
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))


class _Rows(NamedTuple):
    """What one call does to its rows of scores."""

    softmax_scale: float
    dropout_p: float
    seed: Tensor | None
    coords_q: Tensor | None
    coords_k: Tensor | None
    site: int
    causal: bool

    def with_contiguous_coords(self) -> "_Rows":
        """The same with coords that an address describes."""
        coords_q = None if self.coords_q is None else self.coords_q.contiguous()
        return self._replace(coords_q=coords_q, coords_k=None if self.coords_k is None else self.coords_k.contiguous())

    def native_arguments(self, q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple:
        """The C++ routines' arguments from cu_q on."""
        num_tokens, num_heads, head_dim = q.shape
        return (
            cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr(), len(cu_seqlens_q) - 1, num_heads, head_dim,
            self.softmax_scale, address(self.coords_q), address(self.coords_k),
            *dropout_arguments(self.dropout_p, self.seed, self.site), self.causal, num_tokens, torch.get_num_threads(),
        )  # fmt: skip

    def scores(self, q: Tensor, k: Tensor, sequence: _Sequence, dtype: torch.dtype) -> Tensor:
        """Scaled and masked scores [A, Sq, Sk] of one sequence."""
        scores = (q @ k.transpose(1, 2)).to(dtype) * self.softmax_scale
        if self.causal:
            assert self.coords_q is not None and self.coords_k is not None
            is_later = self.coords_k[sequence.k, 1] > self.coords_q[sequence.q, 1:]  # [Sq, Sk]
            scores = scores.masked_fill(is_later, -torch.inf)
        return scores

    def drop(self, x: Tensor, sequence: _Sequence) -> Tensor:
        """x [A, Sq, Sk] times the dropout mask of one sequence, scaled."""
        if self.dropout_p == 0.0:
            return x
        assert self.seed is not None and self.coords_q is not None
        keep = attention_keep_mask(self.seed, self.site, self.coords_q[sequence.q], x.shape[-1], len(x), self.dropout_p)
        return x * keep * dropout_scale(self.dropout_p)
