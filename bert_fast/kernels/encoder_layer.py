"""A layer of BERT from the ops of this back-end, as `reference.encoder_layer` puts them together.

What calls of layers that are alike have in common, all but tensors, seeds and sites, is done once (`_tape.py`).
"""

from typing import Any

from torch import Tensor

from bert_fast.kernels._column_sums import launched_together
from bert_fast.kernels._gemm import settings
from bert_fast.kernels._norm_inputs import norm_inputs
from bert_fast.kernels._tape import Taped
from bert_fast.kernels.attention import attention_bwd, attention_fwd
from bert_fast.kernels.dropout_add_layer_norm import dropout_add_layer_norm_bwd, dropout_add_layer_norm_fwd
from bert_fast.kernels.linear import linear_bwd, linear_fwd
from bert_fast.kernels.mlp import mlp_bwd, mlp_fwd
from bert_fast.kernels.qkv_projection import qkv_projection_bwd, qkv_projection_fwd
from bert_fast.reference.encoder_layer import EncoderLayer, LayerOps
from bert_fast.storage import one_tensor, view_of_neighbours

__all__ = ["encoder_layer_bwd", "encoder_layer_fwd"]

_OPS = LayerOps(
    qkv_projection_fwd, qkv_projection_bwd, linear_fwd, linear_bwd, attention_fwd, attention_bwd,
    dropout_add_layer_norm_fwd, dropout_add_layer_norm_bwd, mlp_fwd, mlp_bwd, one_tensor,
    norm_inputs,
)  # fmt: skip
_FIELDS = EncoderLayer._fields
_PARAMETERS = slice(_FIELDS.index("query_weight"), _FIELDS.index("norm_bias") + 1)
_SITES = [_FIELDS.index(name) for name in ("probabilities_site", "attention_site", "site")]


def _run_forward(*values: Any) -> tuple[Tensor | None, ...]:
    return _OPS.forward(EncoderLayer(*values))


def _run_backward(*values: Any) -> dict[str, Tensor]:
    a, (dy, *kept, wants) = EncoderLayer(*values[: len(_FIELDS)]), values[len(_FIELDS) :]
    with launched_together():  # gradients of biases and of LayerNorms, which nothing in a layer reads
        return _OPS.backward(a, dy, *kept, wants=wants)


def _joined(group: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Of a layer's parameters: weights and biases of query, key and value, each as one tensor, as its ops find them."""
    weights, biases = group[:6:2], group[1:6:2]
    return view_of_neighbours(*weights), None if biases[0] is None else view_of_neighbours(*biases)  # type: ignore[arg-type]


_forward, _backward = (
    Taped(run, _SITES, settings, lasting=_PARAMETERS, helpers=_joined) for run in (_run_forward, _run_backward)
)


def encoder_layer_fwd(a: EncoderLayer) -> tuple[Tensor | None, ...]:
    """(y, what backward reads), as `reference.encoder_layer`."""
    return _forward(tuple(a))


def encoder_layer_bwd(a: EncoderLayer, dy: Tensor, *saved: Any) -> dict[str, Tensor]:
    """Gradients by name, as `reference.encoder_layer`."""
    return _backward((*a, dy, *saved))
