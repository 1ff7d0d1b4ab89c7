"""Padding-free attention with dropout as one differentiable op."""

import math
from typing import Any

import torch
from torch import Tensor

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.checks import check_dtype, check_floating, check_like, check_same_device, check_shape
from bert_fast.ops._register import custom_op
from bert_fast.ops.dropout import check_coords, check_dropout_state
from bert_fast.ops.packing import check_offsets

__all__ = ["attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    coords_q: Tensor | None = None,
    coords_k: Tensor | None = None,
    site: int = 0,
    backend: str | None = None,
) -> Tensor:
    """out = dropout(softmax(scale * q k^T)) v, every sequence on its own.

    q (Tensor [Tq, A, D], floating), k, v (Tensor [Tk, A, D], dtype of q): packed sequences; last dim contiguous, other
        strides free.
    cu_seqlens_q, cu_seqlens_k (Tensor [B + 1], int32): start of every sequence, then T; k's default is q's.
    max_seqlen_q, max_seqlen_k (int): an upper bound of the lengths.
    softmax_scale (float): default 1 / sqrt(D). causal: a key after its query is masked (by the positions in coords).
    dropout_p, seed (Tensor [1], int64), coords_q, coords_k (Tensor [T, 2], int32), site: as in `ops.dropout`; mask
        columns are head * 65536 + key position. coords are needed with dropout and with causal.
    Returns: out (Tensor [Tq, A, D], dtype of q); a query without keys gives exactly 0 and gets zero gradients.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on the CPU (elsewhere with BERT_FAST_DEBUG=1) also
            offsets that do not rise from 0 to T, or a sequence longer than its bound.
        BackendError: the forced back-end cannot run the call.

    Precision: softmax in fp32. Saves q, k, v, out and the log-sum-exp (4 T A D + T A elements), no probabilities.
    Deterministic. Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1; backward by recomputation as in Dao et
    al. 2022 (arXiv:2205.14135), appendix B.
    """
    check_shape("q", q, ("Tq", "A", "D"))
    check_floating("q", q)
    check_like("k", k, ("Tk", q.shape[1], q.shape[2]), "q", q)
    check_like("v", v, tuple(k.shape), "q", q)
    if cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k, coords_k = cu_seqlens_q, max_seqlen_q, coords_q if coords_k is None else coords_k
    if max_seqlen_k is None:
        raise ValueError("max_seqlen_k: expected an int beside cu_seqlens_k, got None")
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_shape(name, cu_seqlens, (len(cu_seqlens_q),))
        check_dtype(name, cu_seqlens, (torch.int32,))
        check_same_device(name, cu_seqlens, "q", q)
    check_dropout_state(dropout_p, seed, coords_q, q, site, ("coords_q", "q"))
    check_dropout_state(dropout_p, seed, coords_k, k, site, ("coords_k", "k"))
    if causal:
        if coords_q is None or coords_k is None:
            raise ValueError("coords_q, coords_k: expected Tensors [T, 2] where causal is True, got None")
        check_coords("coords_q", coords_q, q, "q")
        check_coords("coords_k", coords_k, k, "k")
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(q.shape[2])
    return _forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, dropout_p, seed, coords_q,
        coords_k, site, causal, requested(backend),
    )[0]  # fmt: skip


@custom_op("attention_fwd")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor | None, coords_k: Tensor | None,
    site: int, causal: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # Here, not in `attention`: a compiled call passes by here too, and offsets beyond T would be read from memory.
    check_offsets("cu_seqlens_q", cu_seqlens_q, "max_seqlen_q", max_seqlen_q, q.shape[0])
    if cu_seqlens_k is not cu_seqlens_q or max_seqlen_k != max_seqlen_q or k.shape[0] != q.shape[0]:
        check_offsets("cu_seqlens_k", cu_seqlens_k, "max_seqlen_k", max_seqlen_k, k.shape[0])
    implementation = resolve("attention", OpSpec.of(q, head_dim=q.shape[2], max_seqlen=max_seqlen_k), backend)
    return implementation.attention_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, dropout_p, seed, coords_q,
        coords_k, site, causal,
    )  # fmt: skip


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor]:
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=statistics)


@custom_op("attention_bwd")
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor | None, coords_k: Tensor | None,
    site: int, causal: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    implementation = resolve("attention", OpSpec.of(q, head_dim=q.shape[2], max_seqlen=max_seqlen_k), backend)
    return implementation.attention_bwd(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, dropout_p,
        seed, coords_q, coords_k, site, causal,
    )  # fmt: skip


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale, dropout_p, seed, coords_q, coords_k, *rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, seed, coords_q, coords_k)
    ctx.numbers = (max_q, max_k, scale, dropout_p), rest
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dout: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 15
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seed, coords_q, coords_k = ctx.saved_tensors
    sizes, rest = ctx.numbers
    gradients = _backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *sizes, seed, coords_q, coords_k, *rest)
    return *gradients, *(None,) * 12


_forward.register_autograd(_autograd, setup_context=_setup_context)
