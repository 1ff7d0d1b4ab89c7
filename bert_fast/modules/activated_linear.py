"""act(x W^T + b) for every activation that a configuration can name."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from bert_fast.ops.linear import linear
from bert_fast.ops.linear_gelu import linear_gelu

__all__ = ["activated_linear"]

_GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
_OTHERS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "silu": F.silu, "swish": F.silu, "tanh": F.tanh}


def activated_linear(x: Tensor, dense: nn.Linear, hidden_act: str | Callable[[Tensor], Tensor]) -> Tensor:
    """x [T, K] to [T, N]; GELU in either form is one fused op, anything else a linear layer and a function."""
    if isinstance(hidden_act, str) and hidden_act in _GELUS:
        return linear_gelu(x, dense.weight, dense.bias, approximate=_GELUS[hidden_act])
    act = _OTHERS[hidden_act] if isinstance(hidden_act, str) else hidden_act
    return act(linear(x, dense.weight, dense.bias))
