"""Which linear layers are their weight and bias and nothing else, so that a fused op may take these two.

Others must be called: an adapter adds to the product, a quantised layer has another weight, hooks want to see the call.
"""

from torch import Tensor, nn

from bert_fast.ops.linear import linear

__all__ = ["is_plain", "product_and_bias"]


def is_plain(layer: nn.Module) -> bool:
    """Whether `layer` is an `nn.Linear` itself, without hooks that a call would run."""
    return type(layer) is nn.Linear and not (
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )


def product_and_bias(x: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(x W^T, b) of a plain layer, for an op that adds b itself; (layer(x), None) of any other. x [T, K] to [T, N]."""
    if is_plain(layer):
        return linear(x, layer.weight), layer.bias  # type: ignore[arg-type, return-value]
    return layer(x), None
