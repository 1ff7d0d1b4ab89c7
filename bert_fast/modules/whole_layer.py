"""A layer as one op, and the conditions under which the op can replace the layer's modules.

It cannot where a module within the layer has hooks, is of another class than fuses, or is called in its own way; where
a linear layer or a LayerNorm is more than its parameters (adapters, quantisation, FSDP); and where PyTorch follows each
op (`torch.compile`, modes, `torch.func`). The layer then runs op by op. It does so too where an argument is not what
the op takes: the single ops then raise the error that names it, or can run it.
"""

import itertools
import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bert_fast.addresses import CONTIGUOUS, lie_of
from bert_fast.backend import requested
from bert_fast.modules.attention import PackedAttention, PackedSelfAttention, PackedSelfOutput
from bert_fast.modules.call import Call
from bert_fast.modules.fusable import only_collect, plain_linear
from bert_fast.modules.layer_norm import LayerNorm
from bert_fast.modules.look import Concluded
from bert_fast.modules.mlp import PackedIntermediate, PackedOutput
from bert_fast.modules.originals import GLOBAL_HOOKS
from bert_fast.modules.quantized_linear import QuantizedLinear
from bert_fast.ops._autocast import autocast_dtype
from bert_fast.ops._register import are_plain, is_watched
from bert_fast.ops.encoder_layer import (
    Form,
    encoder_layer_of_form,
    encoder_layer_of_model,
    encoder_layers_of_model,
    is_whole,
    runs_programs,
)
from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.reference.dropout import HEAD_STRIDE
from bert_fast.reference.encoder_layer import NOT_PROJECTED, OfLayer, Projections
from bert_fast.remembered import Remembered

_LINEAR, _NORM = (nn.Linear,), (nn.LayerNorm, LayerNorm)
_KINDS: tuple[tuple[type, ...], ...] = (_LINEAR, _LINEAR, _LINEAR, _LINEAR, _NORM, _LINEAR, _LINEAR, _NORM)
_LINEAR_PLACES = [place for place, kinds in enumerate(_KINDS) if kinds is _LINEAR]
_QUANTIZED = tuple([(QuantizedLinear,) if kinds is _LINEAR else kinds for kinds in _KINDS])
_PLAIN = (Tensor, nn.Parameter)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_FORWARD = nn.Linear.forward
_CALLS = nn.Module.__call__, nn.Module._call_impl
_STRIDED = torch.strided
_memory_of = attrgetter("dtype", "device", "shape", "layout")
_PACKED: tuple[Any, ...] = (PackedAttention, PackedSelfAttention, PackedSelfOutput, PackedIntermediate, PackedOutput)
# What a layer is made of: heads, what closes attention, what widens and what closes the MLP (their probabilities,
# sites and activation are read), and its eight linear layers and LayerNorms; None where the op cannot replace them.
Pieces = tuple[Any, Any, Any, Any, tuple[nn.Module, ...]]
_MAX_FORMS = 64
_LEAST_P = 2.0**-17  # up to which nothing is dropped
_NOTHING_DROPS = (0.0, 0.0, 0.0)


class Around:
    """State that is read once for consecutive layers of a forward pass, if no other code runs between them.

    call: what the layers share. key: a number for everything but the layers that decides which kernels run; None if
    each layer has to check everything. `x`, [T, H], is the input of the first layer; later inputs have the same form.
    """

    backend: str
    is_watched: bool
    key: int | None
    _state: tuple[Any, ...] | None

    def __init__(self, x: Tensor, call: Call, before: "Around | None" = None) -> None:
        """before: of the layers that ran just before, with no other code between; its state still holds."""
        self.call = call
        if before is None:
            self.ask(x)
        else:
            self.backend, self.is_watched, self._state = before.backend, before.is_watched, before._state
            self.key = self._key(x)

    def ask(self, x: Tensor) -> None:
        """Reads the state again, after other code has run."""
        self.backend, self.is_watched = requested(), is_watched(by_profiler=False)
        self._state = None if self.is_watched else self._read_state(x)
        self.key = self._key(x)

    def _read_state(self, x: Tensor) -> tuple[Any, ...] | None:
        module = runs_programs(x.device, x.dtype, self.backend)
        if module is None or is_watched():
            return None
        return (
            self.backend, x.dtype, x.device, x.shape[1], autocast_dtype(x), torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(), module.settings(),
        )  # fmt: skip

    def _key(self, x: Tensor) -> int | None:
        call = self.call
        if self._state is None or not _is_plain_call(x, call):
            return None
        self.of_layers = of_layers = call.of_layers
        if not are_plain((x, *of_layers.tensors)) or lie_of([x]) != _ALIGNED:
            return None
        is_long = call.packing.max_seqlen > HEAD_STRIDE
        key = self._state, of_layers.kind, of_layers.causal, call.seed is None, is_long
        if len(_numbers) >= _MAX_NUMBERS:
            _numbers.clear()
        return _numbers.setdefault(key, next(_count))


_ALIGNED = bytes([CONTIGUOUS]), None  # `lie_of` a contiguous tensor at a multiple of 16 bytes
_MAX_NUMBERS = 4096
_numbers: dict[Any, int] = {}
_count = itertools.count()


def run_whole(
    layer: Any, x: Tensor, call: Call, *, is_called: bool = True, around: Around | None = None
) -> Tensor | None:
    """The layer's output, [T, H] or [M, H] where the call names rows, by one op; None where it is to run op by op.

    is_called: False where a stack runs its layers without calling them. The result is then None as well where a call
    would have done more than this op: hooks, gradient checkpointing, a `__call__` of the layer's own.
    around: of this call, where no code of others has run since it was asked.
    """
    if around is None:
        around = Around(x, call)
    if around.is_watched:
        return None
    whole, parameters = _concluded(layer)
    if whole is None or whole.is_quantized or not (is_called or whole.call_adds_nothing):
        return None
    if not whole.is_projected:
        return whole.run(x, parameters, layer.training, around)
    if runs_programs(x.device, x.dtype, around.backend) is None or not are_plain((x,)):
        return None
    if not whole.takes(x, parameters, call, around.backend):
        return None
    of_queries, (query, key, value, *_) = call.of_rows(x), _pieces(layer)[4]  # type: ignore[index]
    projected = plain_linear(of_queries, query), plain_linear(x, key), plain_linear(x, value)
    for name, one, rows in zip(("query", "key", "value"), projected, (of_queries, x, x), strict=True):
        if type(one) is not Tensor or one.shape != (rows.shape[0], whole.width):
            raise ValueError(
                f"{name}: expected a module that returns a Tensor [{rows.shape[0]}, {whole.width}], got "
                f"{type(one).__name__} {list(one.shape)}"
            )
    q, k, v = (one.to(x.dtype) if are_plain((one,)) else one.to(x.dtype).resolve_neg() for one in projected)
    x, around.call = of_queries, call.picked()
    around.ask(x)
    return whole.run(x, parameters, layer.training, around, (q, k, v))


def run_whole_stack(layers: Sequence[Any], x: Tensor, calls: Sequence[Call]) -> Tensor | None:
    """The output of layers in a row, by one routine; None where they are to be called one after the other.

    In evaluation, on the CPU, where they leave nothing between them that anyone sees. The caller knows that no gradient
    is recorded, and that each layer is of a class that does no more than `run_whole`.
    """
    if not x.is_cpu or is_watched() or calls[-1].hidden_states is not None:
        return None
    given, quantized, backend = [], [], requested()
    for layer, call in zip(layers, calls, strict=True):
        whole, parameters = _concluded(layer)
        if whole is None or layer.training or whole.is_projected or not whole.call_adds_nothing:
            return None
        if not whole.takes(x, parameters, call, backend):
            return None
        given.append((whole.of_layer(parameters, call), call.of_layers))
        if whole.is_quantized:
            modules: Any = _pieces(layer)[4]  # type: ignore[index]
            quantized.append([modules[place].quantized_weight() for place in _LINEAR_PLACES])
    if quantized and len(quantized) < len(given):
        return None
    return encoder_layers_of_model(x, given, backend, quantized)


class _Whole:
    """What the modules of a layer that one op can run say, its parameters apart; it refers to none of them.

    is_projected: queries, keys and values are made by calls of their modules, one of which is more than its parameters.
    is_quantized: linear layers multiply in 8 bits; only layers in a row do so in one routine.
    call_adds_nothing: calling the layer would do no more than its op. probabilities: None where one is no probability.
    """

    def __init__(self, layer: Any, pieces: Pieces, is_projected: bool, is_quantized: bool) -> None:
        heads, closing, up, down, layers = pieces
        self.is_quantized = is_quantized
        self.is_projected, self.head_dim, self.width = is_projected, heads.head_dim, heads.num_heads * heads.head_dim
        runs_again = layer.training and getattr(layer, "gradient_checkpointing", False)
        self.call_adds_nothing = not runs_again and (type(layer).__call__, type(layer)._call_impl) == _CALLS
        self.call_adds_nothing = self.call_adds_nothing and are_own((layer,), (type(layer),))
        self.probabilities = _probabilities((heads, closing, down))
        sites = heads.site, closing.site, down.site
        norms: Any = layers[4], layers[7]
        eps = tuple([float(norm.eps) for norm in norms])
        self._still, self._dropping = (
            (heads.num_heads, up.hidden_act, probabilities, sites, eps)
            for probabilities in (_NOTHING_DROPS, self.probabilities)
        )
        self._forms: dict[Any, Form] = {}

    def run(
        self, x: Tensor, parameters: tuple[Tensor | None, ...], is_training: bool, around: Around,
        projected: Projections = NOT_PROJECTED,
    ) -> Tensor | None:  # fmt: skip
        """The layer's output by its op; None where the op does not take the call."""
        key: Any = None
        if around.key is not None:
            key = around.key, x.requires_grad
            if projected[0] is not None:
                key = *key, *[one.requires_grad for one in projected], lie_of([*projected])
            form = self._forms.get(key)
            if form is not None:
                made = encoder_layer_of_form(form, x, parameters, around.of_layers, projected)
                if made is not None:
                    return made
        call, backend = around.call, around.backend
        if not self.takes(x, parameters, call, backend):
            return None
        layer = self.of_layer(parameters, call)
        y, form = encoder_layer_of_model(x, layer, call.of_layers, backend, is_training, projected)
        if key is not None and form is not None:
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            form.remember(parameters)
            self._forms[key] = form
        return y

    def of_layer(self, parameters: Sequence[Tensor | None], call: Call) -> OfLayer:
        """The layer's part of the arguments."""
        return OfLayer(parameters, *(self._still if call.seed is None else self._dropping))  # type: ignore[arg-type]

    def takes(self, x: Tensor, parameters: Sequence[Tensor | None], call: Call, backend: str) -> bool:
        """Whether the layer's op takes this call; parameters may have been moved or cast in place."""
        keys, p = call.packing, self.probabilities
        return (
            _is_plain_call(x, call)
            and _fits(x, _form_of(parameters), self.width)  # type: ignore[arg-type]
            and is_whole(x.device, x.dtype, x.shape[1], self.head_dim, backend)
            and (call.seed is None or (p is not None and not (p[0] and keys.max_seqlen > HEAD_STRIDE)))
        )


def _whole_and_parameters(layer: Any) -> tuple[_Whole | None, tuple[Tensor | None, ...]]:
    """What one op would run of a layer, and its parameters; None, and none, where it is to run op by op."""
    if layer.chunk_size_feed_forward or any(GLOBAL_HOOKS) or nn.Linear.forward is not _FORWARD:
        return None, ()
    pieces = _pieces(layer)
    if pieces is None:
        return None, ()
    heads, _, up, _, layers = pieces
    hidden_act, norms = up.hidden_act, (layers[4], layers[7])
    if heads.position_embedding_type != "absolute" or not isinstance(hidden_act, str) or hidden_act not in ACTIVATIONS:
        return None, ()
    parameters, is_projected, is_quantized = _parameters(layers), False, False
    if parameters is None and type(layers[0]) is QuantizedLinear:
        parameters, is_quantized = _parameters(layers, _QUANTIZED), True
    elif parameters is None and all(isinstance(one, nn.Module) for one in layers[:3]):
        others, is_projected = _parameters(layers[3:], _KINDS[3:]), True
        parameters = None if others is None else (None,) * 6 + others
    if parameters is None or not all(-math.inf < norm.eps < math.inf for norm in norms):  # type: ignore[operator]
        return None, ()
    return _Whole(layer, pieces, is_projected, is_quantized), parameters


_concluded = Concluded(_whole_and_parameters)


def _pieces(layer: Any) -> Pieces | None:
    if layer.pieces is not None:
        found: Pieces | None = layer.pieces()
        return found
    parts = layer._modules
    attention, up, down = parts["attention"], parts["intermediate"], parts["output"]
    heads, closing = attention._modules.get("self"), attention._modules.get("output")  # None within a wrapper
    if not are_own((attention, heads, closing, up, down), _PACKED):
        return None
    own, of_closing, of_down = heads._modules, closing._modules, down._modules
    return heads, closing, up, down, (
        own.get("query"), own.get("key"), own.get("value"), of_closing["dense"], of_closing["LayerNorm"],
        up._modules["dense"], of_down["dense"], of_down["LayerNorm"],
    )  # fmt: skip


def _probabilities(modules: Sequence[Any]) -> tuple[float, ...] | None:
    """Those with which modules drop; None where one is no probability."""
    found = []
    for module in modules:
        p = module.dropout_p if module.training else 0.0
        if not isinstance(p, int | float) or not 0.0 <= p <= 1.0:
            return None
        found.append(float(p) if p > _LEAST_P else 0.0)
    return tuple(found)


def are_own(containers: Sequence[Any], computing: Sequence[Any]) -> bool:
    """Whether the modules of a layer do what they do in ours, each by its `forward_packed`, and no hooks do more."""
    for module, packed in zip(containers, computing, strict=True):
        own = type(module)
        forward = getattr(own, "forward", None)
        if (
            getattr(own, "forward_packed", None) is not packed.forward_packed
            or (forward is not packed.forward_packed and not hasattr(forward, "leads_to_packed"))
            or "forward" in module.__dict__
            or module._compiled_call_impl is not None
            or (module._forward_hooks and not only_collect(module._forward_hooks))
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


def _is_plain_call(x: Tensor, call: Call) -> bool:
    """Whether the layer's op takes a call for a tensor [T, H], or [M, H], as far as no layer is asked."""
    return (
        call.bias is None
        and call.head_mask is None
        and call.cache is None
        and call.attentions is None
        and type(x) is Tensor
        and x.layout is _STRIDED
        and not x.is_nested
        and x.dim() == 2
        and call.inputs.coords.shape[0] == x.shape[0]
        and call.inputs.coords.device == x.device
    )


def _fits(x: Tensor, form: _Form | None, width: int) -> bool:
    """Whether the layer's op takes x beside parameters of this form."""
    return (
        form is not None
        and (x.dtype is form.dtype or (form.dtype is torch.float32 and x.dtype in _HALF))
        and form.dtype in _DTYPES
        and autocast_dtype(x) in (None, x.dtype)
        and x.shape[1] == form.hidden_size
        and x.device == form.device
        and form.width == width
    )
