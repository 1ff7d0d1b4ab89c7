"""The activations a BERT configuration can name, each with its derivative.

    gelu               x * Phi(x), Phi the normal distribution function: erf, BERT's default
    gelu_new, gelu_pytorch_tanh
                       0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): the approximation; two names of one function
    relu               max(x, 0)
    silu, swish        x * sigmoid(x)
    tanh               tanh(x), also the pooler's

All are elementwise, take any shape and compute in fp32 (fp64 for fp64); results have the dtype of x. Formulas are those
that do not cancel, so that results are right relative to themselves, also where they are tiny: 1 + erf(-z) is written
erfc(z), 1 + tanh(u) as 2 sigmoid(2 u), 1 - tanh(x)^2 as 1 / cosh(x)^2.
Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415), sections 2 and 4.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bert_fast.reference.precision import wide

Elementwise = Callable[[Tensor], Tensor]

_TANH_SCALE = math.sqrt(2.0 / math.pi)
_TANH_CUBIC = 0.044715


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its derivative, both from wide tensors to wide tensors."""

    forward: Elementwise
    derivative: Elementwise


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x / math.sqrt(2.0))


def _normal_pdf(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def gelu_erf(x: Tensor) -> Tensor:
    return x * _normal_cdf(x)


def gelu_erf_derivative(x: Tensor) -> Tensor:
    return _normal_cdf(x) + x * _normal_pdf(x)


def _tanh_argument(x: Tensor) -> Tensor:
    return _TANH_SCALE * (x + _TANH_CUBIC * x * x * x)


def gelu_tanh(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2.0 * _tanh_argument(x))


def gelu_tanh_derivative(x: Tensor) -> Tensor:
    u = _tanh_argument(x)
    s = torch.sigmoid(2.0 * u)
    ds = s * torch.sigmoid(-2.0 * u) * 2.0 * _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBIC * x * x)
    return s + x * ds


def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


def relu_derivative(x: Tensor) -> Tensor:
    return (~(x <= 0)).to(x.dtype)  # 0 at 0 and 1 at NaN, as everyone has it


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def silu_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 + x * torch.sigmoid(-x))


def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


def tanh_derivative(x: Tensor) -> Tensor:
    return 1.0 / torch.cosh(x).square()


_GELU_TANH = Activation(gelu_tanh, gelu_tanh_derivative)
_SILU = Activation(silu, silu_derivative)

# config.hidden_act -> the function
ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(gelu_erf, gelu_erf_derivative),
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "relu": Activation(relu, relu_derivative),
    "silu": _SILU,
    "swish": _SILU,
    "tanh": Activation(tanh, tanh_derivative),
}


def _from_callable(function: Elementwise) -> Activation:
    """A caller's own elementwise function; its derivative is what autograd says."""

    def derivative(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(function(leaf).sum(), leaf)
        return dx

    return Activation(function, derivative)


def activation(hidden_act: str | Elementwise) -> Activation:
    """The activation of a config's `hidden_act`: a name of ACTIVATIONS or any elementwise callable.

    Raises: ValueError for an unknown name.
    """
    if not isinstance(hidden_act, str):
        return _from_callable(hidden_act)
    if hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act: expected a callable or one of {sorted(ACTIVATIONS)}, got {hidden_act!r}")
    return ACTIVATIONS[hidden_act]


def activation_fwd(x: Tensor, hidden_act: str | Elementwise) -> Tensor:
    """y = act(x), elementwise, in the dtype of x."""
    return activation(hidden_act).forward(wide(x)).to(x.dtype)


def activation_bwd(dy: Tensor, x: Tensor, hidden_act: str | Elementwise) -> Tensor:
    """dx = dy * act'(x), in the dtype of x."""
    return (wide(dy) * activation(hidden_act).derivative(wide(x))).to(x.dtype)
