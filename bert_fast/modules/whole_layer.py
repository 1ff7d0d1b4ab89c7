"""A layer as one op: its arguments, where nobody looks inside.

Somebody looks inside where a module within the layer has hooks, is of another class than fuses, or is called in its own
way; where a linear layer or a LayerNorm is more than its parameters (adapters, quantisation, FSDP); and where PyTorch
follows each op (`torch.compile`, modes, `torch.func`). The layer then runs op by op, and so it does where an argument
is not what the op takes: the single ops say what is wrong with it, or know what to do.
"""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bert_fast.backend import requested
from bert_fast.modules.attention import PackedAttention, PackedSelfAttention, PackedSelfOutput
from bert_fast.modules.call import Call
from bert_fast.modules.layer_norm import LayerNorm
from bert_fast.modules.mlp import PackedIntermediate, PackedOutput
from bert_fast.modules.originals import GLOBAL_HOOKS
from bert_fast.ops._autocast import autocast_dtype
from bert_fast.ops._register import is_watched
from bert_fast.ops.encoder_layer import encoder_layer_of_model, encoder_layers_of_model, is_whole
from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.reference.dropout import HEAD_STRIDE
from bert_fast.remembered import Remembered

__all__ = ["Pieces", "are_own", "run_whole", "run_whole_stack"]

_LINEAR, _NORM = (nn.Linear,), (nn.LayerNorm, LayerNorm)
_KINDS: tuple[tuple[type, ...], ...] = (_LINEAR, _LINEAR, _LINEAR, _LINEAR, _NORM, _LINEAR, _LINEAR, _NORM)
_PLAIN = (Tensor, nn.Parameter)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_FORWARD = nn.Linear.forward
_STRIDED = torch.strided
_memory_of = attrgetter("dtype", "device", "shape", "layout")
_PACKED: tuple[Any, ...] = (PackedAttention, PackedSelfAttention, PackedSelfOutput, PackedIntermediate, PackedOutput)
# What a layer is made of: heads, what closes attention, what widens and what closes the MLP (their probabilities,
# sites and activation are read), and its eight linear layers and LayerNorms; None where somebody looks inside.
Pieces = tuple[Any, Any, Any, Any, tuple[nn.Module, ...]]
_LEAST_P = 2.0**-17  # up to which nothing is dropped


def run_whole(layer: Any, x: Tensor, call: Call) -> Tensor | None:
    """The layer's output, [T, H] or [M, H] where the call names rows, by one op; None where it is to run op by op."""
    given = _given(layer, x, call, backend := requested())
    return None if given is None else encoder_layer_of_model(given, backend, layer.training)


def run_whole_stack(layers: Sequence[Any], x: Tensor, calls: Sequence[Call]) -> Tensor | None:
    """The output of layers in a row, by one routine; None where they are to be called one after the other.

    In evaluation, on the CPU, where they leave nothing between them that anyone sees. The caller knows that no gradient
    is recorded, and that each layer is of a class that does no more than `run_whole`.
    """
    if not x.is_cpu or is_watched() or calls[-1].hidden_states is not None:
        return None
    if any(layer.training for layer in layers) or not are_own(layers, list(map(type, layers))):
        return None
    given, backend = [], requested()
    for layer, call in zip(layers, calls, strict=True):
        found = _given(layer, x, call, backend)
        if found is None:
            return None
        given.append(found)
    return encoder_layers_of_model(given, backend)


def _given(layer: Any, x: Tensor, call: Call, backend: str) -> tuple[Any, ...] | None:
    """The fields of `EncoderLayer` but the last three; None where the layer is to run op by op."""
    if (
        call.bias is not None
        or call.head_mask is not None
        or call.cache is not None
        or call.attentions is not None
        or layer.chunk_size_feed_forward
        or is_watched(by_profiler=False)
        or any(GLOBAL_HOOKS)
        or nn.Linear.forward is not _FORWARD
    ):
        return None
    if layer.pieces is not None:
        found = layer.pieces()
        if found is None:
            return None
        heads, closing, up, down, layers = found
    else:
        parts = layer._modules  # not by attribute, each of which takes half a microsecond
        attention, up, down = parts["attention"], parts["intermediate"], parts["output"]
        heads, closing = attention._modules.get("self"), attention._modules.get("output")  # None within a wrapper
        if not are_own((attention, heads, closing, up, down), _PACKED):
            return None
        own, of_closing, of_down = heads._modules, closing._modules, down._modules
        layers = (
            own["query"], own["key"], own["value"], of_closing["dense"], of_closing["LayerNorm"], up._modules["dense"],
            of_down["dense"], of_down["LayerNorm"],
        )  # fmt: skip
    hidden_act = up.hidden_act
    if heads.position_embedding_type != "absolute" or not isinstance(hidden_act, str) or hidden_act not in ACTIVATIONS:
        return None
    attention_norm, norm = layers[4], layers[7]
    parameters = _parameters(layers)
    seed, keys = call.seed, call.packing
    queries = keys if call.row_packing is None else call.row_packing
    if (
        parameters is None
        or not _fits(x, _form_of(parameters), heads.num_heads * heads.head_dim)
        or not -math.inf < attention_norm.eps < math.inf
        or not -math.inf < norm.eps < math.inf
        or not is_whole(x.device, x.dtype, x.shape[1], heads.head_dim, backend)
        or keys.coords.shape[0] != x.shape[0]
        or keys.coords.device != x.device
    ):
        return None
    probabilities = [0.0, 0.0, 0.0]
    if seed is not None:
        for place, module in enumerate((heads, closing, down)):
            p = module.dropout_p if module.training else 0.0
            if not isinstance(p, int | float) or not 0.0 <= p <= 1.0:
                return None
            probabilities[place] = float(p) if p > _LEAST_P else 0.0
    if probabilities[0] and keys.max_seqlen > HEAD_STRIDE:
        return None
    return (
        x, *parameters, call.rows, queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen,
        queries.coords, keys.coords, queries.order, heads.num_heads, call.causal, hidden_act, *probabilities,
        seed if any(probabilities) else None, heads.site, closing.site, down.site, float(attention_norm.eps),
        float(norm.eps),
    )  # fmt: skip


def are_own(containers: Sequence[Any], computing: Sequence[Any]) -> bool:
    """Whether the modules of a layer do what they do in ours, each by its `forward_packed`, and nobody listens."""
    for module, packed in zip(containers, computing, strict=True):
        own = type(module)
        forward = getattr(own, "forward", None)
        if (
            getattr(own, "forward_packed", None) is not packed.forward_packed
            or (forward is not packed.forward_packed and not hasattr(forward, "leads_to_packed"))
            or "forward" in module.__dict__
            or module._compiled_call_impl is not None
            or module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            return False
    return True


def _parameters(layers: tuple[nn.Module, ...]) -> tuple[Tensor | None, ...] | None:
    """Weight and bias of every linear layer and LayerNorm; None where one is more than these."""
    found: list[Any] = []
    for layer, kinds in zip(layers, _KINDS, strict=True):
        own = layer._parameters
        if (
            type(layer) not in kinds
            or layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
            or "weight" not in own
            or "bias" not in own
        ):
            return None
        found += own["weight"], own["bias"]
    return tuple(found)


class _Form(NamedTuple):
    """What the parameters of a layer have in common."""

    dtype: torch.dtype
    device: torch.device
    width: int  # of all heads together
    hidden_size: int


def _form(group: tuple[Tensor | None, ...]) -> _Form | None:
    """The form of weights and biases, as `_parameters` gives them; None where they do not go together."""
    first, up = group[0], group[10]
    if type(first) not in _PLAIN or type(up) not in _PLAIN or first.dim() != 2 or up.dim() != 2:  # type: ignore[union-attr]
        return None
    dtype, device, (width, hidden_size), wide = first.dtype, first.device, first.shape, len(up)  # type: ignore[union-attr,arg-type]
    into, of_norm = (width, hidden_size), (hidden_size,)
    shapes = (into, into, into, into[::-1], of_norm, (wide, hidden_size), (hidden_size, wide), of_norm)
    for weight, bias, shape in zip(group[::2], group[1::2], shapes, strict=True):
        if type(weight) not in _PLAIN or _memory_of(weight) != (dtype, device, shape, _STRIDED):
            return None
        if bias is None:
            if len(shape) == 1:
                return None
        elif type(bias) not in _PLAIN or _memory_of(bias) != (dtype, device, shape[:1], _STRIDED):
            return None
    if not (group[1] is None) == (group[3] is None) == (group[5] is None):
        return None
    return _Form(dtype, device, width, hidden_size)


_form_of = Remembered(_form)


def _fits(x: Tensor, form: _Form | None, width: int) -> bool:
    """Whether the layer's op takes x beside parameters of this form."""
    return (
        form is not None
        and type(x) is Tensor
        and x.layout is _STRIDED
        and not x.is_nested
        and x.dim() == 2
        and (x.dtype is form.dtype or (form.dtype is torch.float32 and x.dtype in _HALF))
        and form.dtype in _DTYPES
        and autocast_dtype(x) in (None, x.dtype)
        and x.shape[1] == form.hidden_size
        and x.device == form.device
        and form.width == width
    )
