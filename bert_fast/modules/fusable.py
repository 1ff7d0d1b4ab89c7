"""Which layers are their parameters and nothing else, so that a fused op may take these.

Others must be called: an adapter adds to the product, a quantised layer has another weight, hooks want to see the call.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.batch_invariance import is_asked
from bert_fast.modules.originals import GLOBAL_HOOKS
from bert_fast.ops.bias_gelu import bias_activation
from bert_fast.ops.linear import linear
from bert_fast.ops.linear_gelu import linear_activation
from bert_fast.storage import one_tensor

_FORWARD = nn.Linear.forward


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered at a module that a call would run."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def collects(hook: Any) -> bool:
    """Whether transformers left this hook at a module whose outputs it collected once.

    It does nothing in a fused model: a call in which it would is left to transformers' code.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def only_collect(hooks: Mapping[int, Any]) -> bool:
    """`collects` of all of a module's hooks."""
    return all(collects(hook) for hook in hooks.values())


def runs_hooks(module: nn.Module) -> bool:
    """Whether a call of a module would run hooks, of the module or of all modules."""
    return bool(  # `has_hooks`, a call less
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(GLOBAL_HOOKS)
    )


def is_plain(layer: nn.Module) -> bool:
    """Whether `layer` is an `nn.Linear` itself, and its call would run torch's own forward and no hooks."""
    return type(layer) is nn.Linear and nn.Linear.forward is _FORWARD and not (  # `has_hooks`, a call less
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
        or any(GLOBAL_HOOKS)
    )  # fmt: skip


def weight_and_bias(layer: nn.Module) -> tuple[Tensor, Any]:
    """The parameters of a plain layer; bias may be None."""
    own = layer._parameters  # a lookup of `layer.weight` takes 1 us, of which a layer of BERT has 150
    if "weight" in own and "bias" in own:
        return own["weight"], own["bias"]  # type: ignore[return-value]
    return layer.weight, layer.bias  # type: ignore[return-value]  # FSDP 1 puts tensors in the parameters' place


_padded: ContextVar[Any] = ContextVar("padded", default=None)  # the packing of the tokens that layers are called with


@contextmanager
def shown_padded(packing: Any) -> Iterator[None]:
    """Within the context hooks of linear layers see tokens of this `Packing` as [B, S, K], padding as zeros."""
    token = _padded.set(packing)
    try:
        yield
    finally:
        _padded.reset(token)


def called(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), x [T, K] to [T, N]: what hooks see is [B, S, K] and [B, S, N] within `shown_padded`."""
    packing = _padded.get() if has_hooks(layer) else None
    made: Tensor
    if packing is None:
        made = layer(x)
        return made
    with shown_padded(None):  # not for what a hook may call
        made = layer(packing.unpack(x))
    sizes = packing.padded_shape or tuple(x.shape[:1])
    if not isinstance(made, Tensor) or made.shape[:-1] != sizes:
        got = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ValueError(f"a hook of {layer}: expected an output [{', '.join(map(str, sizes))}, N], got {got}")
    return packing.pack(made)


def plain_linear(x: Tensor, layer: nn.Module) -> Tensor:
    """layer(x), by the op where it is plain. x [T, K] to [T, N]."""
    return linear(x, *weight_and_bias(layer)) if is_plain(layer) else called(layer, x)


def head_linear(x: Tensor, layer: nn.Module) -> Tensor:
    """layer(x), of a head's few columns: by the library, but where its sums may not depend on the batch. x [T, K]."""
    return plain_linear(x, layer) if is_asked() else layer(x)


def product_and_bias(x: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(x W^T, b) of a plain layer, for an op that adds b itself; (layer(x), None) of any other. x [T, K] to [T, N]."""
    if is_plain(layer):
        weight, bias = weight_and_bias(layer)
        return linear(x, weight), bias
    return called(layer, x), None


def joined_products(x: Tensor, *layers: nn.Module) -> Tensor:
    """The layers' outputs side by side, [T, sum of N_i], from x [T, K]; one product where all of them are plain.

    Weights that lie side by side in memory are not copied, unless a gradient is recorded.
    """
    if not all(is_plain(layer) for layer in layers):
        return torch.cat([called(layer, x) for layer in layers], dim=1)
    weights, biases = zip(*map(weight_and_bias, layers), strict=True)
    if None not in biases:
        if torch.is_grad_enabled() and x.requires_grad:  # saved for backward: what is written to frozen weights until
            return linear(x, torch.cat(weights), torch.cat(biases))  # then must not show
        return linear(x, one_tensor(*weights), one_tensor(*biases))
    return torch.cat([linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], dim=1)


def activated_linear(x: Tensor, dense: nn.Linear, hidden_act: str | Callable[[Tensor], Tensor]) -> Tensor:
    """x [T, K] to [T, N]; a name is one fused op, a callable is called, and so is a layer that is more than its weight.

    Raises: ValueError for an unknown name.
    """
    if is_plain(dense):
        weight, bias = weight_and_bias(dense)
        if isinstance(hidden_act, str):
            return linear_activation(x, weight, bias, hidden_act=hidden_act)
        return hidden_act(linear(x, weight, bias))
    product = called(dense, x)
    return bias_activation(product, hidden_act=hidden_act) if isinstance(hidden_act, str) else hidden_act(product)
