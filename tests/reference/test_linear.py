"""linear and linear_gelu: gradcheck of the explicit backwards, forwards against torch, dtypes, what is not wanted."""

import pytest
import torch
import torch.nn.functional as F

from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.reference.linear import Linear, linear_bwd, linear_fwd
from bert_fast.reference.linear_gelu import LinearGelu, linear_gelu_bwd, linear_gelu_fwd
from bert_fast.testing.explicit import explicit_function
from tests.wants import parametrize_wants

GRADIENTS = ("x", "weight", "bias")


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_gradcheck(has_bias: bool) -> None:
    def forward(x, weight, bias):
        return (linear_fwd(Linear(x, weight, bias)),), Linear(x.detach(), weight.detach(), None)

    def backward(a, dy):
        made = linear_bwd(a, dy, {*GRADIENTS} if has_bias else {"x", "weight"})
        return [made.get(name) for name in GRADIENTS]

    inputs = (_rand(5, 4), _rand(3, 4), _rand(3) if has_bias else None)
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)


@pytest.mark.parametrize("hidden_act", sorted(ACTIVATIONS))
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("save_pre", [True, False])
def test_linear_gelu_gradcheck(hidden_act: str, has_bias: bool, save_pre: bool) -> None:
    def forward(x, weight, bias):
        y, pre = linear_gelu_fwd(LinearGelu(x, weight, bias, hidden_act, save_pre))
        assert (pre is not None) == save_pre
        return (y,), [None if t is None else t.detach() for t in (x, weight, bias, pre)]

    def backward(saved, dy):
        *tensors, pre = saved
        a = LinearGelu(*tensors, hidden_act, save_pre)
        made = linear_gelu_bwd(a, dy, pre, {*GRADIENTS} if has_bias else {"x", "weight"})
        return [made.get(name) for name in GRADIENTS]

    inputs = (_rand(5, 4), _rand(7, 4), _rand(7) if has_bias else None)
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_linear_gelu_is_torch(approximate: str) -> None:
    x, weight, bias = _rand(6, 8), _rand(10, 8), _rand(10)
    hidden_act = {"none": "gelu", "tanh": "gelu_new"}[approximate]
    y, pre = linear_gelu_fwd(LinearGelu(x, weight, bias, hidden_act, True))
    torch.testing.assert_close(pre, F.linear(x, weight, bias))
    torch.testing.assert_close(y, F.gelu(F.linear(x, weight, bias), approximate=approximate))


@parametrize_wants(*GRADIENTS)
def test_what_is_not_wanted_is_not_there_and_changes_nothing(wants: frozenset[str]) -> None:
    x, weight, bias, dy = (t.detach() for t in (_rand(5, 4), _rand(7, 4), _rand(7), _rand(5, 7)))
    _, pre = linear_gelu_fwd(LinearGelu(x, weight, bias, "gelu", True))

    def gradients(x, wants):
        of_gelu = linear_gelu_bwd(LinearGelu(x, weight, bias, "gelu", True), dy, pre, wants)
        return linear_bwd(Linear(x, weight, None), dy, wants), of_gelu

    whole, part = gradients(x, {*GRADIENTS}), gradients(x if "weight" in wants else None, wants)
    for expected, got in zip(whole, part, strict=True):
        assert got.keys() == wants
        assert all(torch.equal(got[name], expected[name]) for name in wants)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
def test_narrow_dtypes_round_once(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, dy = (torch.randn(5, size).to(dtype) for size in (64, 9))
    weight, bias = (torch.randn(*shape).to(weight_dtype or dtype) for shape in ((9, 64), (9,)))
    a = LinearGelu(x, weight, bias, "gelu", True)
    y, pre = linear_gelu_fwd(a)
    exact = F.linear(x.float(), weight.float(), bias.float())
    assert torch.equal(pre, exact.to(dtype))
    torch.testing.assert_close(y, F.gelu(exact).to(dtype))
    wants = {*GRADIENTS}
    for made in (
        linear_bwd(Linear(x, weight, None), dy, wants),
        linear_gelu_bwd(a, dy, pre, wants),
        linear_gelu_bwd(a, dy, None, wants),
    ):
        assert {name: t.dtype for name, t in made.items()} == dict(x=dtype, weight=weight.dtype, bias=weight.dtype)


def test_no_tokens() -> None:
    a = LinearGelu(torch.randn(0, 4), torch.randn(6, 4), torch.randn(6), "gelu", True)
    y, pre = linear_gelu_fwd(a)
    made = linear_gelu_bwd(a, y, pre, {*GRADIENTS})
    assert y.shape == (0, 6) and made["x"].shape == (0, 4) and not made["weight"].any() and not made["bias"].any()
