"""act(x W^T + b) for every activation that a configuration can name."""

from collections.abc import Callable

from torch import Tensor, nn

from bert_fast.ops.bias_gelu import bias_activation
from bert_fast.ops.linear import linear
from bert_fast.ops.linear_gelu import linear_gelu

__all__ = ["activated_linear"]

_GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


def activated_linear(x: Tensor, dense: nn.Linear, hidden_act: str | Callable[[Tensor], Tensor]) -> Tensor:
    """x [T, K] to [T, N]; GELU in either form is one fused op, other names two ops, a callable is called.

    Raises: ValueError for an unknown name.
    """
    if not isinstance(hidden_act, str):
        return hidden_act(linear(x, dense.weight, dense.bias))
    if hidden_act in _GELUS:
        return linear_gelu(x, dense.weight, dense.bias, approximate=_GELUS[hidden_act])
    return bias_activation(linear(x, dense.weight, dense.bias), hidden_act=hidden_act)
