"""Self-attention of one tensor that holds queries, keys and values side by side.

The op of `ops/attention.py` on `qkv.unbind(1)`, by the same back-ends and to the same bits. What differs is memory:
one tensor is saved, and backward writes dq, dk and dv into one dqkv, which the projection's backward takes as it
stands; autograd's own backward of `unbind` would copy all three together.
"""

import math
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from bert_fast.backend import requested
from bert_fast.checks import check_dropout_p
from bert_fast.ops._attention_arguments import (
    check_mask,
    check_registered,
    check_values,
    complete_qkv,
    shape_of_mask,
    with_dense_heads,
)
from bert_fast.ops._autocast import autocast_operands
from bert_fast.ops._define import define
from bert_fast.ops.packing import Packing
from bert_fast.reference.attention import Attention, AttentionQkv
from bert_fast.reference.dropout import dropout_threshold


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
    relative_keys: Tensor | None = None,
    relative_queries: Tensor | None = None,
    sequence_order: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Returns `attention(q, k, v)` of `q, k, v = qkv.unbind(1)`; its gradient is one tensor.

    Args:
        qkv (Tensor [T, 3, A, D], floating): query, key and value of every token, as `qkv_projection` makes them; any
            strides.
        cu_seqlens (Tensor [B + 1], int32): start of every sequence, then T.
        max_seqlen (int): an upper bound of the lengths.
        softmax_scale (float): None: 1 / sqrt(D).
        causal (bool): a query does not see keys at later positions.
        dropout_p (float): probability of dropping an attention probability.
        seed (Tensor [1], int64): needed for dropout, see `ops.dropout`.
        coords (Tensor [T, 2], int32): row and position of every token, as coords_q of `attention`.
        site (int): the place in the model, see `ops.dropout`.
        bias (Tensor [B or 1, A or 1, S or 1, S or 1], floating): added to the scaled scores, as in `attention`.
        relative_keys (Tensor [2M - 1, A, D], dtype of qkv or fp32): as in `attention`.
        relative_queries (Tensor [2M - 1, A, D], dtype of qkv or fp32): as in `attention`.
        sequence_order (Tensor [B], int32): as in `attention`.
        backend (str): "triton", "torch" or "reference"; None: the first that can run the call.

    Returns:
        out (Tensor [T, A, D], dtype of qkv), contiguous, with the bits of `attention`.

    Raises:
        ValueError, TypeError, BackendError: as `attention`.

    Differentiable once, in qkv, bias and the tables. The gradient of qkv is contiguous and written once, in place.
    Saves qkv, out and the log-sum-exp (4 T A D + T A elements), what was given beside them, and the mask where
    `attention` does.

    Example:
        >>> qkv = torch.randn(5, 3, 2, 8)  # as `qkv_projection` makes it
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> ops.attention_qkv(qkv, cu_seqlens=cu_seqlens, max_seqlen=3).shape
        torch.Size([5, 2, 8])
    """
    given = AttentionQkv(  # softmax_scale is put in by `complete_qkv`
        qkv, cu_seqlens, max_seqlen, softmax_scale, dropout_p, seed, coords, site, causal,  # type: ignore[arg-type]
        bias, relative_keys, relative_queries, sequence_order,
    )  # fmt: skip
    return _op(*complete_qkv(given), requested(backend))[0]


def attention_of_packed(
    qkv: Tensor, packing: Packing, *, causal: bool, dropout_p: float, seed: Tensor | None, site: int
) -> Tensor:
    """`attention_qkv` of what a model has made itself, and therefore does not check again: for modules.

    qkv (Tensor [T, 3, A, D]) of the tokens of packing; seed is needed where dropout_p, which is checked, is not 0.
    Raises: as `attention_qkv` where the packing is of other tokens.
    """
    coords = packing.coords
    if coords.shape[0] != qkv.shape[0] or coords.dtype is not torch.int32 or coords.device != qkv.device:
        return attention_qkv(  # which says what does not fit
            qkv, cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen, causal=causal, dropout_p=dropout_p,
            seed=seed, coords=coords, site=site,
        )  # fmt: skip
    (qkv,) = autocast_operands(qkv)
    check_dropout_p("dropout_p", dropout_p)
    if dropout_threshold(dropout_p) == 0:  # p below 2**-17 drops nothing
        dropout_p, seed = 0.0, None
    return _op(
        qkv, packing.cu_seqlens, packing.max_seqlen, 1.0 / math.sqrt(qkv.shape[3]), float(dropout_p), seed,
        None if seed is None and not causal else coords, site, causal, None, None, None, packing.order,
        seed is not None and torch.is_grad_enabled() and qkv.requires_grad, requested(),
    )[0]  # fmt: skip


def _forward(module: Any, a: AttentionQkv) -> tuple[Tensor, Tensor, Tensor | None]:
    three = a.of_three
    _check_values(three)
    return module.attention_fwd(with_dense_heads(three))


def _check_values(three: Attention) -> None:
    check_values(three, names=("qkv", "qkv"), suffixes=("", ""))


def _backward(
    module: Any, a: AttentionQkv, dout: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, wants: Set[str]
) -> dict[str, Tensor]:
    dqkv = torch.empty(a.qkv.shape, dtype=a.qkv.dtype, device=a.qkv.device)
    made = module.attention_bwd(with_dense_heads(a.of_three), dout, out, lse, mask, wants, dqkv)
    return made | {"qkv": dqkv}


_op = define(
    "attention_qkv",
    AttentionQkv,
    outputs={"out": "x T A D", "lse": "s A T", "mask": "int32 _ _ _"},
    perhaps={"mask": lambda module, a: shape_of_mask(module, a.of_three)},
    backward="dout qkv out lse mask? ...",
    gradients="qkv bias? relative_keys? relative_queries?",
    copies=("cu_seqlens",),  # a loader may fill its buffer again
    last_dimension="head_dim",
    implementation="attention",
    run=_forward,
    run_backward=_backward,
    check=lambda a: check_registered(a.of_three, suffixes=("", "")),
    check_backward=lambda a, out, lse, mask, *_: check_mask(a.of_three, mask),
    check_values=lambda a, *_: _check_values(a.of_three),
)
