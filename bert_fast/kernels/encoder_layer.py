"""A layer of BERT from the ops of this back-end, as `reference.encoder_layer` puts them together.

What calls of layers that are alike have in common, all but tensors, seeds and sites, is done once (`_programs.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from bert_fast.kernels._column_sums import launched_together
from bert_fast.kernels._gemm import settings
from bert_fast.kernels._norm_inputs import norm_inputs
from bert_fast.kernels._programs import Programs
from bert_fast.kernels.attention import attention_bwd, attention_fwd
from bert_fast.kernels.dropout_add_layer_norm import dropout_add_layer_norm_bwd, dropout_add_layer_norm_fwd
from bert_fast.kernels.linear import linear_bwd, linear_fwd
from bert_fast.kernels.mlp import mlp_bwd, mlp_fwd
from bert_fast.kernels.qkv_projection import qkv_projection_bwd, qkv_projection_fwd
from bert_fast.reference.encoder_layer import EncoderLayer, LayerOps, Saved
from bert_fast.storage import one_tensor, view_of_neighbours

__all__ = ["encoder_layer_bwd", "encoder_layer_fwd"]

_OPS = LayerOps(
    qkv_projection_fwd, qkv_projection_bwd, linear_fwd, linear_bwd, attention_fwd, attention_bwd,
    dropout_add_layer_norm_fwd, dropout_add_layer_norm_bwd, mlp_fwd, mlp_bwd, one_tensor,
    norm_inputs,
)  # fmt: skip
_FIELDS = EncoderLayer._fields
_PARAMETERS = slice(_FIELDS.index("query_weight"), _FIELDS.index("norm_bias") + 1)
_OF_FORWARD = {
    "x": "T_", "rows": "M", "cu_seqlens_q": "O", "cu_seqlens_k": "O", "coords_q": "M_", "coords_k": "T_",
    "sequence_order": "B",
}  # fmt: skip
_OF_BACKWARD = _OF_FORWARD | {
    "dy": "M_", "y": "M_", "qkv": "T_", "q": "M_", "kv": "T_", "out": "M_", "lse": "_M", "z": "M_", "attention_h": "M_",
    "attention_mean": "M", "attention_rstd": "M", "pre": "M_", "h": "M_", "mean": "M", "rstd": "M",
}  # fmt: skip
_NUMBERS = [_FIELDS.index(name) for name in (
    "max_seqlen_q", "max_seqlen_k", "probabilities_site", "attention_site", "site",
)]  # fmt: skip


def _run_forward(*values: Any) -> tuple[Tensor | None, ...]:
    return _OPS.forward(EncoderLayer(*values))


def _run_backward(*values: Any) -> dict[str, Tensor]:
    a, (dy, *kept, wants) = EncoderLayer(*values[: len(_FIELDS)]), values[len(_FIELDS) :]
    with launched_together():  # gradients of biases and of LayerNorms, which nothing in a layer reads
        return _OPS.backward(a, dy, *kept, wants=wants)


def _joined(group: tuple[Tensor | None, ...]) -> dict[tuple[int, ...], Tensor | None]:
    """Of a layer's parameters: weights and biases of query, key and value, each as one tensor, as its ops find them."""
    weights, biases = group[:6:2], group[1:6:2]
    return {
        (0, 2, 4): view_of_neighbours(*weights),  # type: ignore[arg-type]
        (1, 3, 5): None if biases[0] is None else view_of_neighbours(*biases),  # type: ignore[arg-type]
    }


def _programs(run: Callable[..., Any], fields: Sequence[str], letters: Mapping[str, str]) -> Programs:
    sizes = {place: letters[name] for place, name in enumerate(fields) if name in letters}
    return Programs(run, sizes=sizes, integers=_NUMBERS, settings=settings, lasting=_PARAMETERS, joined=_joined)


_forward = _programs(_run_forward, _FIELDS, _OF_FORWARD)
_backward = _programs(_run_backward, (*_FIELDS, "dy", "y", *Saved._fields, "wants"), _OF_BACKWARD)


def encoder_layer_fwd(a: EncoderLayer) -> tuple[Tensor | None, ...]:
    """(y, what backward reads), as `reference.encoder_layer`."""
    return _forward(tuple(a))


def encoder_layer_bwd(a: EncoderLayer, dy: Tensor, *saved: Any) -> dict[str, Tensor]:
    """Gradients by name, as `reference.encoder_layer`."""
    return _backward((*a, dy, *saved))
