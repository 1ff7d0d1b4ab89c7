"""act(x + bias) from PyTorch's own activations, which compute half precision in fp32 inside."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.torch._gemm import cast

_aten = torch.ops.aten


def _tanh_backward(dy: Tensor, pre: Tensor) -> Tensor:
    # 1 - tanh(z)^2 = 4 s (1 - s) with s = sigmoid(2 z): on the CPU a sigmoid takes a third of the time of a tanh.
    wide = pre if pre.dtype == torch.float64 else pre.float()
    return _aten.sigmoid_backward(4.0 * dy.to(wide.dtype), torch.sigmoid(2.0 * wide)).to(dy.dtype)


# config.hidden_act -> (the function, its backward from dy and the pre-activation)
_GELU_TANH = (
    lambda pre: F.gelu(pre, approximate="tanh"),
    lambda dy, pre: _aten.gelu_backward(dy, pre, approximate="tanh"),
)
_SILU = (F.silu, _aten.silu_backward)
_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (F.gelu, _aten.gelu_backward),
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "relu": (torch.relu, lambda dy, pre: _aten.threshold_backward(dy, pre, 0)),
    "silu": _SILU,
    "swish": _SILU,
    "tanh": (torch.tanh, _tanh_backward),
}


def bias_gelu_fwd(a: BiasGelu) -> Tensor:
    """y, as `reference.bias_gelu`."""
    return cast(_FUNCTIONS[a.hidden_act][0](_pre_activation(a)), a.x.dtype)


def bias_gelu_bwd(a: BiasGelu, dy: Tensor) -> dict[str, Tensor]:
    """Gradients by name, as `reference.bias_gelu`."""
    pre = _pre_activation(a)
    dx = _FUNCTIONS[a.hidden_act][1](cast(dy, pre.dtype), pre)
    made = {"x": cast(dx, a.x.dtype)}
    return made if a.bias is None else made | {"bias": dx.sum(0).to(a.bias.dtype)}


def _pre_activation(a: BiasGelu) -> Tensor:
    """x + bias without rounding the sum to half precision; x itself where there is no bias."""
    if a.bias is None:
        return a.x
    return a.x + a.bias if a.x.dtype in (torch.float32, torch.float64) else a.x.float() + a.bias.float()
