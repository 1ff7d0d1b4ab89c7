"""Self-attention of one tensor that holds queries, keys and values side by side.

The op of `ops/attention.py` on `qkv.unbind(1)`, by the same back-ends and to the same bits. What differs is memory:
one tensor is saved, and backward writes dq, dk and dv into one dqkv, which the projection's backward takes as it
stands; autograd's own backward of `unbind` would copy all three together.
Registered as `bert_fast::attention_qkv_fwd` and `_bwd`.
"""

from typing import Any

import torch
from torch import Tensor

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.ops._attention_arguments import (
    arguments_of_qkv,
    check_registered,
    check_values,
    looks_up,
    save_arguments,
    saved_arguments,
    with_dense_heads,
)
from bert_fast.ops._autocast import without_autocast
from bert_fast.ops._register import custom_op, without_none

__all__ = ["attention_qkv"]

_NUM_ARGUMENTS = 15  # of the forward op
_BIAS, _HEAD_MASK, _DISTANCE_TABLE = 9, 10, 11  # their places


def attention_qkv(
    qkv: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    coords: Tensor | None = None,
    site: int = 0,
    bias: Tensor | None = None,
    head_mask: Tensor | None = None,
    distance_table: Tensor | None = None,
    key_term: bool = False,
    sequence_order: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`attention(q, k, v)` of `q, k, v = qkv.unbind(1)`, whose gradient is one tensor.

    qkv (Tensor [T, 3, A, D], floating): query, key and value of every token, as `qkv_projection` makes them; strides
        are free.
    cu_seqlens (Tensor [B + 1], int32): start of every sequence, then T.
    max_seqlen (int): an upper bound of the lengths.
    coords (Tensor [T, 2], int32): (row, position) of every token, as coords_q of `attention`.
    The rest: as in `attention`.
    Returns: out (Tensor [T, A, D], dtype of qkv), contiguous, the bits of `attention`.

    Raises: as `attention`.

    Differentiable once, in qkv, bias, head_mask and distance_table; the gradient of qkv is contiguous and written once,
    in place. Saves qkv, out and the log-sum-exp (4 T A D + T A elements), and what was given beside them.
    """
    arguments = arguments_of_qkv(
        qkv, cu_seqlens, max_seqlen, softmax_scale, dropout_p, seed, coords, site, causal, bias, head_mask,
        distance_table, key_term, sequence_order,
    )  # fmt: skip
    return _forward(*arguments, requested(backend))[0]


def _of_three(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float, dropout_p: float, seed: Tensor | None,
    coords: Tensor | None, site: int, causal: bool, bias: Tensor | None, head_mask: Tensor | None,
    distance_table: Tensor | None, key_term: bool, sequence_order: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments as back-ends take them, from q on."""
    coords_k = coords if looks_up(causal, bias, head_mask, distance_table) else None
    return (
        *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, softmax_scale, dropout_p, seed, coords,
        coords_k, site, causal, bias, head_mask, distance_table, key_term, sequence_order,
    )  # fmt: skip


def _implementation(qkv: Tensor, backend: str) -> Any:
    return resolve("attention", OpSpec.of(qkv, head_dim=qkv.shape[3]), backend)


_TENSORS = {
    "qkv": "x T 3 A+ D+", "cu_seqlens": "int32 O+", "seed": "int64 1", "coords": "int32 T 2", "bias": "f _ _ _ _",
    "head_mask": "f _ _ _ _", "distance_table": "f _ D", "sequence_order": "int32 _",
}  # fmt: skip


def _check(*arguments: Any) -> None:
    check_registered(*_of_three(*arguments), suffixes=("", ""))


def _check_values(*arguments: Any) -> None:
    check_values(*_of_three(*arguments), names=("qkv", "qkv"), suffixes=("", ""))


@custom_op(
    "attention_qkv_fwd",
    tensors=_TENSORS,
    check=lambda *arguments: _check(*arguments[:-1]),
)
@without_autocast
def _forward(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float, dropout_p: float, seed: Tensor | None,
    coords: Tensor | None, site: int, causal: bool, bias: Tensor | None, head_mask: Tensor | None,
    distance_table: Tensor | None, key_term: bool, sequence_order: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    arguments = _of_three(
        qkv, cu_seqlens, max_seqlen, softmax_scale, dropout_p, seed, coords, site, causal, bias, head_mask,
        distance_table, key_term, sequence_order,
    )  # fmt: skip
    check_values(*arguments, names=("qkv", "qkv"), suffixes=("", ""))
    return _implementation(qkv, backend).attention_fwd(*with_dense_heads(*arguments))


@_forward.register_fake
def _(qkv: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor]:
    num_tokens, _, num_heads, head_dim = qkv.shape
    statistics = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    return qkv.new_empty((num_tokens, num_heads, head_dim)), qkv.new_empty((num_heads, num_tokens), dtype=statistics)


@custom_op(
    "attention_qkv_bwd",
    tensors=_TENSORS | {"dout": "x T A D", "out": "x T A D", "lse": "s A T"},
    check=lambda dout, qkv, out, lse, *rest: _check(qkv, *rest[:13]),
    check_values=lambda dout, qkv, out, lse, *rest: _check_values(qkv, *rest[:13]),
)
@without_autocast
def _backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float,
    dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int, causal: bool, bias: Tensor | None,
    head_mask: Tensor | None, distance_table: Tensor | None, key_term: bool, sequence_order: Tensor | None,
    wants_dbias: bool, wants_dhead_mask: bool, wants_ddistance_table: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, *rest = with_dense_heads(
        *_of_three(
            qkv, cu_seqlens, max_seqlen, softmax_scale, dropout_p, seed, coords, site, causal, bias, head_mask,
            distance_table, key_term, sequence_order,
        )
    )  # fmt: skip
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    dextras = _implementation(qkv, backend).attention_bwd(
        dout, q, k, v, out, lse, *rest, wants_dbias, wants_dhead_mask, wants_ddistance_table, dqkv
    )[3:]
    return dqkv, *without_none(dextras, qkv)


@_backward.register_fake
def _(dout: Tensor, qkv: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *_, bias, head_mask, distance_table, _key_term, _sequence_order, _, _, _, _backend = arguments
    wanted = zip((bias, head_mask, distance_table), arguments[-4:-1], strict=True)
    dextras = tuple(x.new_empty(x.shape) if x is not None and wants else None for x, wants in wanted)
    return qkv.new_empty(qkv.shape), *without_none(dextras, qkv)


def _autograd(ctx: Any, dout: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * _NUM_ARGUMENTS
    out, lse, (qkv, *arguments, backend) = saved_arguments(ctx)
    places = (0, _BIAS, _HEAD_MASK, _DISTANCE_TABLE)
    wants = [ctx.needs_input_grad[place] for place in places]
    made = _backward(dout, qkv, out, lse, *arguments, *wants[1:], backend)
    gradients: list[Tensor | None] = [None] * _NUM_ARGUMENTS
    for place, gradient, wanted in zip(places, made, wants, strict=True):
        gradients[place] = gradient if wanted else None
    return tuple(gradients)


_forward.register_autograd(_autograd, setup_context=save_arguments)
