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
from bert_fast.modules.fusable import plain_linear
from bert_fast.modules.layer_norm import LayerNorm
from bert_fast.modules.look import concluded
from bert_fast.modules.mlp import PackedIntermediate, PackedOutput
from bert_fast.modules.originals import GLOBAL_HOOKS
from bert_fast.ops._autocast import autocast_dtype
from bert_fast.ops._register import is_watched
from bert_fast.ops.encoder_layer import encoder_layer_of_model, encoder_layers_of_model, is_whole, projects
from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.reference.dropout import HEAD_STRIDE
from bert_fast.reference.encoder_layer import OfLayer
from bert_fast.remembered import Remembered

__all__ = ["Pieces", "are_own", "run_whole", "run_whole_stack"]

_LINEAR, _NORM = (nn.Linear,), (nn.LayerNorm, LayerNorm)
_KINDS: tuple[tuple[type, ...], ...] = (_LINEAR, _LINEAR, _LINEAR, _LINEAR, _NORM, _LINEAR, _LINEAR, _NORM)
_PLAIN = (Tensor, nn.Parameter)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_FORWARD = nn.Linear.forward
_CALLS = nn.Module.__call__, nn.Module._call_impl
_STRIDED = torch.strided
_memory_of = attrgetter("dtype", "device", "shape", "layout")
_PACKED: tuple[Any, ...] = (PackedAttention, PackedSelfAttention, PackedSelfOutput, PackedIntermediate, PackedOutput)
# What a layer is made of: heads, what closes attention, what widens and what closes the MLP (their probabilities,
# sites and activation are read), and its eight linear layers and LayerNorms; None where somebody looks inside.
Pieces = tuple[Any, Any, Any, Any, tuple[nn.Module, ...]]
_LEAST_P = 2.0**-17  # up to which nothing is dropped


def run_whole(layer: Any, x: Tensor, call: Call, *, is_called: bool = True) -> Tensor | None:
    """The layer's output, [T, H] or [M, H] where the call names rows, by one op; None where it is to run op by op.

    is_called: the layer was; where it was not, None too where somebody would miss its call.
    """
    if is_watched(by_profiler=False):
        return None
    whole, backend = concluded(layer, _whole_of), requested()
    if whole is None or not (is_called or whole.is_missed_by_nobody) or not whole.takes(x, call, backend):
        return None
    if whole.projecting is None:
        return encoder_layer_of_model(x, whole.of_layer(call), call.of_layers, backend, layer.training)
    if not projects(x, backend) or call.rows is not None:
        return None
    projected = [plain_linear(x, one) for one in whole.projecting]
    if any(type(one) is not Tensor or one.shape != (x.shape[0], whole.width) for one in projected):
        raise ValueError(
            f"query, key, value: expected modules that return Tensors [{x.shape[0]}, {whole.width}], got "
            f"{[(type(one).__name__, list(one.shape)) for one in projected]}"
        )
    q, k, v = (one if one.dtype is x.dtype else one.to(x.dtype) for one in projected)
    return encoder_layer_of_model(x, whole.of_layer(call), call.of_layers, backend, layer.training, (q, k, v))


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
        whole = concluded(layer, _whole_of)
        if whole is None or whole.projecting is not None or not whole.takes(x, call, backend):
            return None
        given.append((whole.of_layer(call), call.of_layers))
    return encoder_layers_of_model(x, given, backend)


class _Whole:
    """What a layer comes to, as long as its modules stay as they are.

    dropping, still: with the probabilities of its modules, and with none. projecting: query, key and value, where one
    of these is more than its parameters, else None. is_missed_by_nobody: a call of the layer would do no more.
    """

    def __init__(
        self, dropping: OfLayer, head_dim: int, projecting: tuple[nn.Module, ...] | None, is_missed_by_nobody: bool
    ) -> None:
        self.is_missed_by_nobody = is_missed_by_nobody
        self.dropping, self.still = dropping, dropping._replace(probabilities=(0.0, 0.0, 0.0))
        self.head_dim, self.projecting = head_dim, projecting
        self.width = dropping.num_heads * head_dim

    def of_layer(self, call: Call) -> OfLayer:
        """The layer's part of the arguments."""
        return self.still if call.seed is None else self.dropping

    def takes(self, x: Tensor, call: Call, backend: str) -> bool:
        """Whether the layer's op takes this call; parameters may have been moved or cast in place."""
        keys = call.packing
        return (
            call.bias is None
            and call.head_mask is None
            and call.cache is None
            and call.attentions is None
            and _fits(x, _form_of(self.dropping.parameters), self.width)
            and is_whole(x.device, x.dtype, x.shape[1], self.head_dim, backend)
            and keys.coords.shape[0] == x.shape[0]
            and keys.coords.device == x.device
            and not (call.seed is not None and self.dropping.probabilities[0] and keys.max_seqlen > HEAD_STRIDE)
        )


def _whole_of(layer: Any) -> _Whole | None:
    """None where the layer is to run op by op, whatever it is called with."""
    if layer.chunk_size_feed_forward or any(GLOBAL_HOOKS) or nn.Linear.forward is not _FORWARD:
        return None
    if layer.pieces is not None:
        found = layer.pieces()
        if found is None:
            return None
        heads, closing, up, down, layers = found
    else:
        parts = layer._modules
        attention, up, down = parts["attention"], parts["intermediate"], parts["output"]
        heads, closing = attention._modules.get("self"), attention._modules.get("output")  # None within a wrapper
        if not are_own((attention, heads, closing, up, down), _PACKED):
            return None
        own, of_closing, of_down = heads._modules, closing._modules, down._modules
        layers = (
            own["query"], own["key"], own["value"], of_closing["dense"], of_closing["LayerNorm"], up._modules["dense"],
            of_down["dense"], of_down["LayerNorm"],
        )  # fmt: skip
    hidden_act, eps = up.hidden_act, (layers[4].eps, layers[7].eps)
    if heads.position_embedding_type != "absolute" or not isinstance(hidden_act, str) or hidden_act not in ACTIVATIONS:
        return None
    if not all(isinstance(one, int | float) and -math.inf < one < math.inf for one in eps):
        return None
    projecting = None
    parameters = _parameters(layers)
    if parameters is None and None not in layers[:3]:
        projecting, of_others = layers[:3], _parameters(layers[3:], _KINDS[3:])
        parameters = None if of_others is None else ((None,) * 6 + of_others)
    if parameters is None:
        return None
    probabilities = []
    for module in (heads, closing, down):
        p = module.dropout_p if module.training else 0.0
        if not isinstance(p, int | float) or not 0.0 <= p <= 1.0:
            return None
        probabilities.append(float(p) if p > _LEAST_P else 0.0)
    sites, (of_attention, of_mlp) = (heads.site, closing.site, down.site), eps
    dropping = OfLayer(
        parameters, heads.num_heads, hidden_act, tuple(probabilities), sites, (float(of_attention), float(of_mlp))  # type: ignore[arg-type]
    )
    runs_again = layer.training and getattr(layer, "gradient_checkpointing", False)
    is_missed_by_nobody = not runs_again and (type(layer).__call__, type(layer)._call_impl) == _CALLS
    return _Whole(dropping, heads.head_dim, projecting, is_missed_by_nobody and are_own((layer,), (type(layer),)))


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


def _parameters(
    layers: tuple[nn.Module, ...], kinds_of: tuple[tuple[type, ...], ...] = _KINDS
) -> tuple[Tensor | None, ...] | None:
    """Weight and bias of every linear layer and LayerNorm; None where one is more than these."""
    found: list[Any] = []
    for layer, kinds in zip(layers, kinds_of, strict=True):
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
    """The form of weights and biases; None where they do not go together. Those of projections may not be there."""
    first, up = group[6], group[10]
    if type(first) not in _PLAIN or type(up) not in _PLAIN or first.dim() != 2 or up.dim() != 2:  # type: ignore[union-attr]
        return None
    dtype, device, (hidden_size, width), wide = first.dtype, first.device, first.shape, len(up)  # type: ignore[union-attr,arg-type]
    into, of_norm = (width, hidden_size), (hidden_size,)
    shapes = (into, into, into, into[::-1], of_norm, (wide, hidden_size), (hidden_size, wide), of_norm)
    start = 3 if group[0] is None else 0
    for weight, bias, shape in zip(group[2 * start :: 2], group[2 * start + 1 :: 2], shapes[start:], strict=True):
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
