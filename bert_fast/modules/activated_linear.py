"""act(x W^T + b) for every activation that a configuration can name, and for callables."""

from collections.abc import Callable

from torch import Tensor, nn

from bert_fast.ops.linear import linear
from bert_fast.ops.linear_gelu import linear_activation

__all__ = ["activated_linear"]


def activated_linear(x: Tensor, dense: nn.Linear, hidden_act: str | Callable[[Tensor], Tensor]) -> Tensor:
    """x [T, K] to [T, N]; a name is one fused op, a callable is called.

    Raises: ValueError for an unknown name.
    """
    if isinstance(hidden_act, str):
        return linear_activation(x, dense.weight, dense.bias, hidden_act=hidden_act)
    return hidden_act(linear(x, dense.weight, dense.bias))
