"""A layer of BERT from the ops of this back-end, as `reference.encoder_layer` puts them together."""

from typing import Any

from torch import Tensor

from bert_fast.aten.attention import attention_bwd, attention_fwd
from bert_fast.aten.dropout_add_layer_norm import dropout_add_layer_norm_bwd, dropout_add_layer_norm_fwd
from bert_fast.aten.linear import linear_bwd, linear_fwd
from bert_fast.aten.mlp import mlp_bwd, mlp_fwd
from bert_fast.aten.qkv_projection import qkv_projection_bwd, qkv_projection_fwd
from bert_fast.reference.encoder_layer import EncoderLayer, LayerOps
from bert_fast.storage import one_tensor

__all__ = ["encoder_layer_bwd", "encoder_layer_fwd"]

_OPS = LayerOps(
    qkv_projection_fwd, qkv_projection_bwd, linear_fwd, linear_bwd, attention_fwd, attention_bwd,
    dropout_add_layer_norm_fwd, dropout_add_layer_norm_bwd, mlp_fwd, mlp_bwd, one_tensor,
)  # fmt: skip


def encoder_layer_fwd(a: EncoderLayer) -> tuple[Tensor | None, ...]:
    """(y, what backward reads), as `reference.encoder_layer`."""
    return _OPS.forward(a)


def encoder_layer_bwd(a: EncoderLayer, dy: Tensor, *saved: Any) -> dict[str, Tensor]:
    """Gradients by name, as `reference.encoder_layer`."""
    *kept, wants = saved
    return _OPS.backward(a, dy, *kept, wants=wants)
