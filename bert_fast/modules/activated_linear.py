"""act(x W^T + b) for every activation that a configuration can name, and for callables."""

from collections.abc import Callable

from torch import Tensor, nn

from bert_fast.modules.plain_linear import is_plain, weight_and_bias
from bert_fast.ops.bias_gelu import bias_activation
from bert_fast.ops.linear import linear
from bert_fast.ops.linear_gelu import linear_activation

__all__ = ["activated_linear"]


def activated_linear(x: Tensor, dense: nn.Linear, hidden_act: str | Callable[[Tensor], Tensor]) -> Tensor:
    """x [T, K] to [T, N]; a name is one fused op, a callable is called, and so is a layer that is more than its weight.

    Raises: ValueError for an unknown name.
    """
    if is_plain(dense):
        weight, bias = weight_and_bias(dense)
        if isinstance(hidden_act, str):
            return linear_activation(x, weight, bias, hidden_act=hidden_act)
        return hidden_act(linear(x, weight, bias))
    product = dense(x)
    return bias_activation(product, hidden_act=hidden_act) if isinstance(hidden_act, str) else hidden_act(product)
