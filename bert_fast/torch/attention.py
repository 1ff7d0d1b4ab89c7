"""Attention over packed sequences: one C++ routine on the CPU in fp32, tensor arithmetic per sequence elsewhere.

Nothing of size [A, Sq, Sk] outlives a sequence: backward makes the scores again (5 matrix products instead of 4) from
q and k, the C++ routine probabilities from them and lse. That routine keeps the scores of one block of queries
in the cache; `docs/kernels/attention.md` compares it with PyTorch's flash attention for CPUs. In other dtypes, with
larger heads and on other devices sequences are worked on one by one, here.
Half precision: matrix products in it, everything between them in fp32.
"""

import itertools
from collections.abc import Iterator, Set
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert_fast.batch_invariance import refuse_on_gpu
from bert_fast.reference.attention import Attention
from bert_fast.reference.dropout import attention_keep_mask, dropout_scale
from bert_fast.reference.precision import wide_dtype
from bert_fast.torch._native import address, dropout_arguments, routines
from bert_fast.torch.relative_positions import RelativePositions

MAX_NATIVE_HEAD_DIM = 256


def attention_fwd(a: Attention) -> tuple[Tensor, Tensor, None]:
    """(out, lse, no mask), as `reference.attention`."""
    out = torch.empty(a.q.shape, dtype=a.q.dtype, device=a.q.device)
    lse = a.q.new_empty((a.q.shape[1], a.q.shape[0]), dtype=wide_dtype(a.q.dtype))
    lib = _native(a)
    if lib is not None:
        a = _contiguous(a)  # must live as long as the call: the routine sees addresses
        lib.attention_fwd(
            a.q.data_ptr(), a.k.data_ptr(), a.v.data_ptr(), a.q.stride(0), a.k.stride(0), a.v.stride(0), out.data_ptr(),
            lse.data_ptr(), *_native_arguments(a), **_native_extras(a),
        )  # fmt: skip
        return out, lse, None
    refuse_on_gpu("attention", a.q)
    for sequence in _sequences(a):
        q, k, v = _heads(a.q, sequence.q), _heads(a.k, sequence.k), _heads(a.v, sequence.k)
        scores = _scores(a, q, k, sequence, lse.dtype)  # [A, Sq, Sk]
        lse[:, sequence.q] = torch.logsumexp(scores, dim=-1)  # -inf for a row without keys
        probs = _probabilities(scores)
        weights = _times(probs, _kept(a, probs, sequence))
        out[sequence.q] = (weights.to(v.dtype) @ v).transpose(0, 1)
    return out, lse, None


def attention_bwd(
    a: Attention, dout: Tensor, out: Tensor, lse: Tensor, mask: None, wants: Set[str], dqkv: Tensor | None = None
) -> dict[str, Tensor]:
    """Gradients by name, as `reference.attention`."""
    if dqkv is None:
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (a.q, a.k, a.v))
    else:
        dq, dk, dv = dqkv.unbind(1)
    made = {"q": dq, "k": dk, "v": dv}
    lib = _native(a)
    if lib is not None:
        totals = {name: a.q.new_empty(getattr(a, name).shape) for name in wants}
        dense, dout = _contiguous(a), dout.contiguous()
        lib.attention_bwd(
            dout.data_ptr(), dense.q.data_ptr(), dense.k.data_ptr(), dense.v.data_ptr(), lse.data_ptr(),
            dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), dense.q.stride(0), dense.k.stride(0), dense.v.stride(0),
            dq.stride(0), dk.stride(0), dv.stride(0), *_native_arguments(dense), **_native_extras(dense),
            **{f"d{name}": total.data_ptr() for name, total in totals.items()},
        )  # fmt: skip
        return made | {name: total.to(getattr(a, name).dtype) for name, total in totals.items()}
    for gradient in made.values():
        gradient.zero_()
    totals = {name: _zeros_like(getattr(a, name), lse.dtype) for name in wants}
    for sequence in _sequences(a):
        q, k, v = _heads(a.q, sequence.q), _heads(a.k, sequence.k), _heads(a.v, sequence.k)
        dout_b = _heads(dout, sequence.q)
        probs = _probabilities(_scores(a, q, k, sequence, lse.dtype))
        kept = _kept(a, probs, sequence)
        dv[sequence.k] = (_times(probs, kept).to(v.dtype).transpose(1, 2) @ dout_b).transpose(0, 1)
        dprobs = _times((dout_b @ v.transpose(1, 2)).to(probs.dtype), kept)
        # From P and dP, not from dout and out: in half precision the rounding of out would not cancel.
        delta = (probs * dprobs).sum(-1, keepdim=True)
        dscores = probs * (dprobs - delta)
        if "bias" in totals:
            _add_block(totals["bias"], sequence, dscores)
        dscores = (a.softmax_scale * dscores).to(q.dtype)
        dq_b, dk_b = dscores @ k, dscores.transpose(1, 2) @ q
        relative = _relative_positions(a, sequence)
        if relative is not None:
            relative.add_gradients(dscores, q, k, dq_b, dk_b, totals)
        dq[sequence.q], dk[sequence.k] = dq_b.transpose(0, 1), dk_b.transpose(0, 1)
    return made | {name: total.to(getattr(a, name).dtype) for name, total in totals.items()}


def _native(a: Attention) -> ModuleType | None:
    """The extension if its routine can run this call, else None."""
    if a.q.shape[2] > MAX_NATIVE_HEAD_DIM:
        return None
    return routines(a.q)


def _contiguous(a: Attention) -> Attention:
    """The same, as addresses and strides between tokens describe it."""
    copies: dict[str, Any] = {}
    for name, x in (("cu_seqlens_q", a.cu_seqlens_q), ("cu_seqlens_k", a.cu_seqlens_k), ("coords_q", a.coords_q),
                    ("coords_k", a.coords_k)):  # fmt: skip
        if x is not None and not x.is_contiguous():
            copies[name] = x.contiguous()
    for name, x in (("q", a.q), ("k", a.k), ("v", a.v)):
        # A token's A * D elements of [T, A, D] stand together; strides between tokens are free.
        if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            copies[name] = x.contiguous()
    for name, x in (("relative_keys", a.relative_keys), ("relative_queries", a.relative_queries)):
        if x is not None and x.stride(2) != 1:
            copies[name] = x.contiguous()
    if a.bias is not None and a.bias.dtype is not torch.float32:
        elements = a.bias[tuple(slice(None if stride else 1) for stride in a.bias.stride())]
        copies["bias"] = elements.float().expand(a.bias.shape)  # what is broadcast is not written out
    return a._replace(**copies) if copies else a


def _native_arguments(a: Attention) -> tuple[Any, ...]:
    """The C++ routines' arguments from cu_q to num_threads."""
    num_tokens, num_heads, head_dim = a.q.shape
    return (
        a.cu_seqlens_q.data_ptr(), a.cu_seqlens_k.data_ptr(), a.cu_seqlens_q.shape[0] - 1, num_tokens, a.k.shape[0],
        num_heads, head_dim, a.softmax_scale, address(a.coords_q), address(a.coords_k),
        *dropout_arguments(a.dropout_p, a.seed, a.site), a.causal, num_tokens, torch.get_num_threads(),
    )  # fmt: skip


def _native_extras(a: Attention) -> dict[str, Any]:
    """The C++ routines' arguments of bias and tables."""
    extras: dict[str, Any] = {}
    if a.bias is not None:
        extras = {"bias": address(a.bias), "bias_sizes": a.bias.shape, "bias_strides": a.bias.stride()}
    for name, table in (("relative_keys", a.relative_keys), ("relative_queries", a.relative_queries)):
        if table is not None:
            extras |= {name: address(table), f"{name}_strides": table.stride()[:2], "num_distances": len(table)}
    return extras


def _heads(x: Tensor, tokens: slice) -> Tensor:
    """One sequence of [T, A, D] as [A, S, D], a view."""
    return x[tokens].transpose(0, 1)


def _probabilities(scores: Tensor) -> Tensor:
    """Softmax over keys, 0 in a row without keys.

    Not exp(scores - lse): where a mask pushed a whole row to -1e9, adding log(number of keys) is lost in rounding.
    """
    return torch.softmax(scores, dim=-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _zeros_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To add the gradient of x up in."""
    return torch.zeros(x.shape, dtype=dtype, device=x.device)


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


def _sequences(a: Attention) -> Iterator[_Sequence]:
    """Every sequence that has queries."""
    spans = (itertools.pairwise(edges.tolist()) for edges in (a.cu_seqlens_q, a.cu_seqlens_k))
    tokens = [(slice(*q), slice(*k)) for q, k in zip(*spans, strict=True) if q[1] > q[0]]
    if not a.has_extras:
        return (_Sequence(q, k, 0, slice(None), slice(None)) for q, k in tokens)
    assert a.coords_q is not None and a.coords_k is not None
    rows = a.coords_q[[q.start for q, _ in tokens], 0].tolist()
    positions_q = _positions(a.coords_q, [q for q, _ in tokens])
    positions_k = _positions(a.coords_k, [k for _, k in tokens])
    return (
        _Sequence(*spans, row, *positions)
        for spans, row, *positions in zip(tokens, rows, positions_q, positions_k, strict=True)
    )


def _scores(a: Attention, q: Tensor, k: Tensor, sequence: _Sequence, dtype: torch.dtype) -> Tensor:
    """Scaled and masked scores [A, Sq, Sk] of one sequence."""
    scores = (q @ k.transpose(1, 2)).to(dtype)
    relative = _relative_positions(a, sequence)
    if relative is not None:
        relative.add_scores(scores, q, k)
    scores = scores * a.softmax_scale
    if a.bias is not None and scores.numel():
        block, index = _block_of(a.bias, sequence)
        scores = scores + block[index].to(dtype)
    if a.causal:
        assert a.coords_q is not None and a.coords_k is not None
        is_later = a.coords_k[sequence.k, 1] > a.coords_q[sequence.q, 1:]  # [Sq, Sk]
        scores = scores.masked_fill(is_later, -torch.inf)
    return scores


def _relative_positions(a: Attention, sequence: _Sequence) -> RelativePositions | None:
    """Of one sequence, None where there are none or nothing to score."""
    if not a.has_tables or sequence.k.start == sequence.k.stop:
        return None
    assert a.coords_q is not None and a.coords_k is not None
    positions = a.coords_q[sequence.q, 1], a.coords_k[sequence.k, 1]
    return RelativePositions(a.relative_keys, a.relative_queries, *positions)


def _kept(a: Attention, x: Tensor, sequence: _Sequence) -> Tensor | None:
    """What dropout multiplies x [A, Sq, Sk] of one sequence by; None without dropout."""
    if a.dropout_p == 0.0:
        return None
    assert a.seed is not None and a.coords_q is not None
    keep = attention_keep_mask(a.seed, a.site, a.coords_q[sequence.q], x.shape[-1], len(x), a.dropout_p)
    return keep.to(x.dtype) * dropout_scale(a.dropout_p)


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
