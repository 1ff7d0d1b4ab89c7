"""linear and linear_gelu: gradcheck of the explicit backwards, forwards against torch, dtypes, what is not wanted."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.reference.linear import linear_bwd, linear_fwd
from bert_fast.reference.linear_gelu import linear_gelu_bwd, linear_gelu_fwd
from bert_fast.testing.explicit import explicit_function

ALL = (True, True, True)


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_gradcheck(has_bias: bool) -> None:
    function = explicit_function(
        lambda x, w, b: ((linear_fwd(x, w, b),), (x.detach(), w.detach())),
        lambda saved, dy: linear_bwd(dy, *saved, True, True, has_bias),
    )
    assert torch.autograd.gradcheck(function, (_rand(5, 4), _rand(3, 4), _rand(3) if has_bias else None))


@pytest.mark.parametrize("hidden_act", sorted(ACTIVATIONS))
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("save_pre", [True, False])
def test_linear_gelu_gradcheck(hidden_act: str, has_bias: bool, save_pre: bool) -> None:
    def forward(x, weight, bias):
        y, pre = linear_gelu_fwd(x, weight, bias, hidden_act, save_pre)
        assert (pre is not None) == save_pre
        return (y,), tuple(None if t is None else t.detach() for t in (x, weight, bias, pre))

    def backward(saved, dy):
        return linear_gelu_bwd(dy, *saved, hidden_act, True, True, has_bias)

    inputs = (_rand(5, 4), _rand(7, 4), _rand(7) if has_bias else None)
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_linear_gelu_is_torch(approximate: str) -> None:
    x, weight, bias = _rand(6, 8), _rand(10, 8), _rand(10)
    y, pre = linear_gelu_fwd(x, weight, bias, {"none": "gelu", "tanh": "gelu_new"}[approximate], True)
    torch.testing.assert_close(pre, F.linear(x, weight, bias))
    torch.testing.assert_close(y, F.gelu(F.linear(x, weight, bias), approximate=approximate))


@pytest.mark.parametrize("wants", list(product((True, False), repeat=3)))
def test_what_is_not_wanted_is_not_there_and_changes_nothing(wants: tuple[bool, bool, bool]) -> None:
    x, weight, bias, dy = (t.detach() for t in (_rand(5, 4), _rand(7, 4), _rand(7), _rand(5, 7)))
    _, pre = linear_gelu_fwd(x, weight, bias, "gelu", True)
    whole = linear_bwd(dy, x, weight, *ALL), linear_gelu_bwd(dy, x, weight, bias, pre, "gelu", *ALL)
    kept = x if wants[1] else None
    part = linear_bwd(dy, kept, weight, *wants), linear_gelu_bwd(dy, kept, weight, bias, pre, "gelu", *wants)
    for expected, got in zip(whole, part, strict=True):
        for one, other, wanted in zip(expected, got, wants, strict=True):
            assert torch.equal(one, other) if wanted else other is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
def test_narrow_dtypes_round_once(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, dy = (torch.randn(5, size).to(dtype) for size in (64, 9))
    weight, bias = (torch.randn(*shape).to(weight_dtype or dtype) for shape in ((9, 64), (9,)))
    y, pre = linear_gelu_fwd(x, weight, bias, "gelu", True)
    exact = F.linear(x.float(), weight.float(), bias.float())
    assert torch.equal(pre, exact.to(dtype))
    torch.testing.assert_close(y, F.gelu(exact).to(dtype))
    for dx, dweight, dbias in (
        linear_bwd(dy, x, weight, *ALL),
        linear_gelu_bwd(dy, x, weight, bias, pre, "gelu", *ALL),
        linear_gelu_bwd(dy, x, weight, bias, None, "gelu", *ALL),
    ):
        assert dx.dtype == dtype and dweight.dtype == dbias.dtype == weight.dtype


def test_no_tokens() -> None:
    x, weight, bias = torch.randn(0, 4), torch.randn(6, 4), torch.randn(6)
    y, pre = linear_gelu_fwd(x, weight, bias, "gelu", True)
    dx, dweight, dbias = linear_gelu_bwd(y, x, weight, bias, pre, "gelu", *ALL)
    assert y.shape == (0, 6) and dx.shape == (0, 4) and not dweight.any() and not dbias.any()
