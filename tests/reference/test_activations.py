"""Activations: against torch's own functions, derivatives by gradcheck, names and callables."""

import pytest
import torch
import torch.nn.functional as F

from bert_fast.reference.activations import ACTIVATIONS, activation, activation_bwd, activation_fwd
from bert_fast.testing.explicit import explicit_function
from bert_fast.testing.tolerances import tolerance

TORCH = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def test_every_name_is_compared() -> None:
    assert TORCH.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_equals_torch(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-12, 12, 101), torch.tensor([0.0, -0.0, 1e-7, -20.0, 20.0])]).to(dtype)
    y, expected = activation_fwd(x, name), TORCH[name](x.double())
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=tolerance("", "", dtype).floor)


@pytest.mark.parametrize("name", TORCH)
def test_derivative(name: str) -> None:
    # 0 is left out: relu has no derivative there
    x = torch.tensor([-9.0, -3.0, -1.1, -0.3, 1e-3, 0.4, 1.0, 2.5, 9.0], dtype=torch.float64, requires_grad=True)
    function = explicit_function(
        lambda x: ((activation_fwd(x, name),), x.detach()), lambda x, dy: (activation_bwd(dy, x, name),)
    )
    assert torch.autograd.gradcheck(function, (x,))


def test_gelus_differ() -> None:
    x = torch.linspace(-3, 3, 50)
    assert (activation_fwd(x, "gelu") - activation_fwd(x, "gelu_new")).abs().max() > 1e-4


def test_callable_is_differentiated() -> None:
    x, dy = torch.randn(2, 10, dtype=torch.float64).unbind()
    function = torch.nn.Softplus()
    assert torch.equal(activation_fwd(x, function), F.softplus(x))
    torch.testing.assert_close(activation_bwd(dy, x, function), dy * torch.sigmoid(x))


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"hidden_act: expected a callable or one of .*'gelu'.*, got 'geglu'"):
        activation("geglu")
