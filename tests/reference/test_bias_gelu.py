"""bias_gelu: gradcheck with and without bias, dtypes, the tails of the activations."""

import math

import pytest
import torch

from bert_fast.reference.activations import ACTIVATIONS, activation_bwd, activation_fwd
from bert_fast.reference.bias_gelu import BiasGelu, bias_gelu_bwd, bias_gelu_fwd
from bert_fast.testing.explicit import explicit_function


@pytest.mark.parametrize("hidden_act", sorted(ACTIVATIONS))
def test_gradcheck(hidden_act: str) -> None:
    def forward(x, bias):
        return (bias_gelu_fwd(BiasGelu(x, bias, hidden_act)),), BiasGelu(x.detach(), bias.detach(), hidden_act)

    def backward(a, dy):
        made = bias_gelu_bwd(a, dy)
        return made["x"], made["bias"]

    x, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 7), (7,)))
    assert torch.autograd.gradcheck(explicit_function(forward, backward), (x, bias))


def test_without_bias_it_is_the_activation() -> None:
    x, dy = torch.randn(2, 3, 5).unbind()
    a = BiasGelu(x, None, "gelu")
    assert torch.equal(bias_gelu_fwd(a), activation_fwd(x, "gelu"))
    made = bias_gelu_bwd(a, dy)
    assert torch.equal(made["x"], activation_bwd(dy, x, "gelu")) and "bias" not in made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_round_once(dtype: torch.dtype) -> None:
    x, dy, bias = torch.randn(4, 6).to(dtype), torch.randn(4, 6).to(dtype), torch.randn(6)
    a = BiasGelu(x, bias, "gelu")
    assert torch.equal(bias_gelu_fwd(a), bias_gelu_fwd(a._replace(x=x.float())).to(dtype))
    assert {name: t.dtype for name, t in bias_gelu_bwd(a, dy).items()} == dict(x=dtype, bias=torch.float32)


def test_tails_are_right_relative_to_themselves() -> None:
    """Against asymptotic series and exponentials that do not cancel."""
    x = torch.tensor([-14.0, -30.0], dtype=torch.float64)
    for value, z in zip(activation_fwd(x, "gelu").tolist(), x.tolist(), strict=True):
        density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
        series = 1.0 - z**-2 + 3.0 * z**-4 - 15.0 * z**-6 + 105.0 * z**-8
        assert value == pytest.approx(-density * series)  # the next term is below 1e-6
    dtanh = activation_bwd(torch.ones_like(x), x, "tanh")
    assert dtanh.tolist() == pytest.approx([4.0 * math.exp(2.0 * z) for z in x.tolist()])
    dgelu = activation_bwd(torch.ones(1, dtype=torch.float64), x[:1], "gelu_new")
    step = 1e-6
    slope = (activation_fwd(x[:1] + step, "gelu_new") - activation_fwd(x[:1] - step, "gelu_new")) / (2.0 * step)
    assert dgelu.tolist() == pytest.approx(slope.tolist())
