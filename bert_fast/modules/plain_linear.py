"""Which layers are their parameters and nothing else, so that a fused op may take these.

Others must be called: an adapter adds to the product, a quantised layer has another weight, hooks want to see the call.
"""

import torch
from torch import Tensor, nn

from bert_fast.ops.linear import linear
from bert_fast.storage import one_tensor

__all__ = ["is_plain", "is_watched", "joined_products", "product_and_bias"]


def is_watched(module: nn.Module) -> bool:
    """Whether hooks are registered that a call would run."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_plain(layer: nn.Module) -> bool:
    """Whether `layer` is an `nn.Linear` itself, without hooks that a call would run."""
    return type(layer) is nn.Linear and not is_watched(layer)


def product_and_bias(x: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(x W^T, b) of a plain layer, for an op that adds b itself; (layer(x), None) of any other. x [T, K] to [T, N]."""
    if is_plain(layer):
        return linear(x, layer.weight), layer.bias  # type: ignore[arg-type, return-value]
    return layer(x), None


def joined_products(x: Tensor, *layers: nn.Module) -> Tensor:
    """The layers' outputs side by side, [T, sum of N_i], from x [T, K]; one product where all of them are plain.

    Weights that lie side by side in one storage are not copied, unless a gradient is recorded.
    """
    if not all(is_plain(layer) for layer in layers):
        return torch.cat([layer(x) for layer in layers], dim=1)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases and len(biases) < len(layers):
        return torch.cat([linear(x, layer.weight, layer.bias) for layer in layers], dim=1)  # type: ignore[arg-type]
    weight = one_tensor(*(layer.weight for layer in layers))  # type: ignore[arg-type]
    return linear(x, weight, one_tensor(*biases) if biases else None)  # type: ignore[arg-type]
