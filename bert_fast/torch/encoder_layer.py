"""A layer of BERT from the ops of this back-end, as `reference.encoder_layer` puts them together.

What keeps nothing for backward, in fp32 on the CPU, is one C++ routine with products of its own, which reads the
weights as they lie (`csrc/cpu/linear.h`): no layout of them is kept that could be older than they are, and a token's
result does not depend on the tokens beside it.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bert_fast import native
from bert_fast.reference.encoder_layer import EncoderLayer, LayerOps, Saved
from bert_fast.reference.linear_int8 import QuantizedWeight
from bert_fast.storage import one_tensor
from bert_fast.torch._native import address
from bert_fast.torch.attention import MAX_NATIVE_HEAD_DIM, attention_bwd, attention_fwd
from bert_fast.torch.dropout_add_layer_norm import dropout_add_layer_norm_bwd, dropout_add_layer_norm_fwd
from bert_fast.torch.linear import linear_bwd, linear_fwd
from bert_fast.torch.mlp import mlp_bwd, mlp_fwd
from bert_fast.torch.qkv_projection import qkv_projection_bwd, qkv_projection_fwd

_OPS = LayerOps(
    qkv_projection_fwd, qkv_projection_bwd, linear_fwd, linear_bwd, attention_fwd, attention_bwd,
    dropout_add_layer_norm_fwd, dropout_add_layer_norm_bwd, mlp_fwd, mlp_bwd, one_tensor,
)  # fmt: skip


_FIELDS = EncoderLayer._fields
_ACTIVATIONS = {"gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish"}  # that the routine knows
_PARAMETERS = slice(_FIELDS.index("query_weight"), _FIELDS.index("norm_bias") + 1)
_NOT_QUANTIZED = [0] * 18
# Of x and of the parameters.
_DTYPES = {(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)}
_NOTHING_SAVED = (None,) * len(Saved._fields)


def encoder_layer_fwd(a: EncoderLayer) -> tuple[Tensor | None, ...]:
    """(y, what backward reads), as `reference.encoder_layer`."""
    if not a.keeps:
        y = encoder_layers_fwd([a])
        if y is not None:
            return y, *_NOTHING_SAVED
    return _OPS.forward(a)


def encoder_layers_fwd(
    layers: Sequence[EncoderLayer], quantized: Sequence[Sequence[QuantizedWeight]] = ()
) -> Tensor | None:
    """y [M, H] of layers in a row by the C++ routine, without gradients; None where it cannot run them.

    x is that of the first, rows those of the last. quantized: of each layer its six weights in 8 bits, or none.
    Where x is in bf16, products are; fp32 parameters are rounded then. All else is in fp32, until y is rounded.
    """
    first, last = layers[0], layers[-1]
    given = (first.x, last.rows, first.cu_seqlens_k, first.coords_k, last.cu_seqlens_q, last.coords_q)
    lib = native.load() if first.x.is_cpu else None
    if lib is None or lib.simd_level() == "portable" or not all(one is None or one.is_contiguous() for one in given):
        return None  # without vector instructions that were written for, libraries multiply faster
    described = [_described(a, weights) for a, weights in zip(layers, quantized or itertools.repeat(()), strict=False)]
    if None in described:
        return None
    num_queries = last.coords_q.shape[0]
    x = first.x.float()
    y = x.new_empty((num_queries, x.shape[1]))
    if not num_queries:  # rows without elements have no address, as if there were none
        return y.to(first.x.dtype)
    lib.encoder_layers_fwd(
        x.data_ptr(), y.data_ptr(), described, address(last.rows), last.cu_seqlens_q.data_ptr(),
        last.cu_seqlens_k.data_ptr(), last.coords_q.data_ptr(), last.coords_k.data_ptr(),
        last.cu_seqlens_k.shape[0] - 1, num_queries, *x.shape, torch.get_num_threads(),
    )  # fmt: skip
    return y.to(first.x.dtype)


def _described(a: EncoderLayer, quantized: Sequence[QuantizedWeight]) -> tuple[Any, ...] | None:
    """A layer as the C++ routine takes it; None if it cannot."""
    parameters: Any = a[_PARAMETERS]
    width = a.query_weight.shape[0]
    if a.probabilities_dropout_p or a.attention_dropout_p or a.dropout_p or a.hidden_act not in _ACTIVATIONS:
        return None
    if width > a.num_heads * MAX_NATIVE_HEAD_DIM:
        return None
    dtype = a.query_weight.dtype
    if (a.x.dtype, dtype) not in _DTYPES:
        return None
    for one in parameters:
        if one is not None and (one.dtype is not dtype or not one.is_contiguous()):
            return None
    sizes = width, a.up_weight.shape[0], a.num_heads
    in_8_bits = [one.data_ptr() for weight in quantized for one in weight] or _NOT_QUANTIZED
    is_bf16 = a.x.dtype is torch.bfloat16, dtype is torch.bfloat16
    options = a.causal, a.hidden_act, a.attention_eps, a.eps
    return [address(one) for one in parameters], *sizes, *options, in_8_bits, *is_bf16


def encoder_layer_bwd(a: EncoderLayer, dy: Tensor, *saved: Any) -> dict[str, Tensor]:
    """Gradients by name, as `reference.encoder_layer`."""
    *kept, wants = saved
    return _OPS.backward(a, dy, *kept, wants=wants)
