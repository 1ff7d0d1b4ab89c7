"""activated_linear: every name of a configuration against PyTorch, callables, unknown names."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bert_fast.modules.fusable import activated_linear
from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.testing.compare import assert_close_to_truth

PLAIN = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def run(function, dense: nn.Linear, x: torch.Tensor, dy: torch.Tensor):  # type: ignore[no-untyped-def]
    leaf = x.clone().requires_grad_()
    y = function(leaf, dense)
    return y.detach(), *torch.autograd.grad(y, (leaf, *dense.parameters()), dy)


@pytest.mark.parametrize("hidden_act", sorted(ACTIVATIONS))
def test_every_name(hidden_act: str) -> None:
    dense, double = nn.Linear(12, 20), nn.Linear(12, 20, dtype=torch.float64)
    double.load_state_dict(dense.state_dict())
    x, dy = torch.randn(7, 12), torch.randn(7, 20)
    plain = lambda x, dense: PLAIN[hidden_act](dense(x))  # noqa: E731
    actual = run(lambda x, dense: activated_linear(x, dense, hidden_act), dense, x, dy)
    stock, truth = run(plain, dense, x, dy), run(plain, double, x.double(), dy.double())
    for name, *outputs in zip(("y", "dx", "dweight", "dbias"), actual, stock, truth, strict=True):
        assert_close_to_truth("linear_gelu", name, *outputs)


def test_callables_are_called() -> None:
    dense, x = nn.Linear(4, 6), torch.randn(3, 4)
    assert torch.equal(activated_linear(x, dense, F.softplus), F.softplus(activated_linear(x, dense, lambda y: y)))


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"hidden_act: expected one of .*, got 'geglu'"):
        activated_linear(torch.zeros(2, 3), nn.Linear(3, 4), "geglu")
