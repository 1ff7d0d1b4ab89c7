"""linear_gelu and qkv_projection: gradcheck of the explicit backwards, forwards against torch, dtypes, no tokens."""

import pytest
import torch
import torch.nn.functional as F

from bert_fast.reference.linear import linear_bwd, linear_fwd
from bert_fast.reference.linear_gelu import linear_gelu_bwd, linear_gelu_fwd
from bert_fast.reference.qkv_projection import qkv_projection_bwd, qkv_projection_fwd
from bert_fast.testing.explicit import explicit_function


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_gelu_gradcheck(approximate: str, has_bias: bool) -> None:
    def forward(x, weight, bias):
        y, pre = linear_gelu_fwd(x, weight, bias, approximate)
        return (y,), (x.detach(), weight.detach(), pre.detach())

    def backward(saved, dy):
        dx, dweight, dbias = linear_gelu_bwd(dy, *saved, approximate)
        return dx, dweight, dbias if has_bias else None

    inputs = (_rand(5, 4), _rand(7, 4), _rand(7) if has_bias else None)
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)


def test_linear_gradcheck() -> None:
    function = explicit_function(
        lambda x, w, b: ((linear_fwd(x, w, b),), (x.detach(), w.detach())), lambda saved, dy: linear_bwd(dy, *saved)
    )
    assert torch.autograd.gradcheck(function, (_rand(5, 4), _rand(3, 4), _rand(3)))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_linear_gelu_is_torch(approximate: str) -> None:
    x, weight, bias = _rand(6, 8), _rand(10, 8), _rand(10)
    y, pre = linear_gelu_fwd(x, weight, bias, approximate)
    torch.testing.assert_close(pre, F.linear(x, weight, bias))
    torch.testing.assert_close(y, F.gelu(F.linear(x, weight, bias), approximate=approximate))


def test_qkv_gradcheck() -> None:
    def forward(x, wq, bq, wk, bk, wv, bv):
        saved = tuple(t.detach() for t in (x, wq, wk, wv))
        return qkv_projection_fwd(x, wq, bq, wk, bk, wv, bv), saved

    inputs = (_rand(5, 4), _rand(6, 4), _rand(6), _rand(6, 4), _rand(6), _rand(6, 4), _rand(6))
    function = explicit_function(forward, lambda saved, *d: qkv_projection_bwd(*d, *saved))
    assert torch.autograd.gradcheck(function, inputs)


def test_qkv_is_three_linears() -> None:
    x, *parameters = (_rand(5, 4), _rand(6, 4), _rand(6), _rand(6, 4), _rand(6), _rand(6, 4), _rand(6))
    for got, weight, bias in zip(qkv_projection_fwd(x, *parameters), parameters[::2], parameters[1::2], strict=True):
        torch.testing.assert_close(got, F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_round_once(dtype: torch.dtype) -> None:
    x, weight, bias, dy = (torch.randn(*s).to(dtype) for s in ((5, 64), (9, 64), (9,), (5, 9)))
    y, pre = linear_gelu_fwd(x, weight, bias, "none")
    assert torch.equal(pre, F.linear(x.float(), weight.float(), bias.float()).to(dtype))
    assert [t.dtype for t in (y, *linear_gelu_bwd(dy, x, weight, pre, "none"))] == [dtype] * 4


def test_no_tokens() -> None:
    x, weight, bias = torch.randn(0, 4), torch.randn(6, 4), torch.randn(6)
    y, pre = linear_gelu_fwd(x, weight, bias, "none")
    dx, dweight, dbias = linear_gelu_bwd(y, x, weight, pre, "none")
    assert y.shape == (0, 6) and dx.shape == (0, 4) and not dweight.any() and not dbias.any()
