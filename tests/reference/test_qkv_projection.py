"""qkv_projection: gradcheck of the explicit backward, forward against torch, wider parameters, no tokens."""

import pytest
import torch
import torch.nn.functional as F

from bert_fast.reference.qkv_projection import QkvProjection, qkv_projection_bwd, qkv_projection_fwd
from bert_fast.testing.explicit import explicit_function

GRADIENTS = ("x", "weight", "bias")


def parameters(width: int, hidden: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """wq, bq, wk, bk, wv, bv."""
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3) for shape in ((width, hidden), width)]


def without_biases(a: QkvProjection) -> QkvProjection:
    """As backward is given it."""
    return a._replace(bq=None, bk=None, bv=None)


@pytest.mark.parametrize("has_bias", [True, False])
def test_gradcheck(has_bias: bool) -> None:
    def forward(*tensors):
        saved = QkvProjection(*(None if t is None else t.detach() for t in tensors))
        return (qkv_projection_fwd(QkvProjection(*tensors)),), without_biases(saved)

    def backward(a, dqkv):
        wants = {*GRADIENTS} if has_bias else {"x", "weight"}
        made = qkv_projection_bwd(a, dqkv, wants)
        assert made.keys() == wants
        dbiases = made["bias"].chunk(3) if has_bias else (None,) * 3
        return made["x"], *(d for pair in zip(made["weight"].chunk(3), dbiases, strict=True) for d in pair)

    given = parameters(6, 4)
    if not has_bias:
        given[1::2] = [None] * 3
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(explicit_function(forward, backward), (x, *given))


def test_it_is_three_linears() -> None:
    x, given = torch.randn(5, 4, dtype=torch.float64), parameters(6, 4)
    projected = qkv_projection_fwd(QkvProjection(x, *given)).chunk(3, dim=1)
    for got, weight, bias in zip(projected, given[::2], given[1::2], strict=True):
        torch.testing.assert_close(got, F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_parameters_beside_half_precision(dtype: torch.dtype) -> None:
    a = QkvProjection(torch.randn(5, 4).to(dtype), *(p.detach() for p in parameters(6, 4, torch.float32)))
    qkv = qkv_projection_fwd(a)
    wide = qkv_projection_fwd(QkvProjection(*(t.double() for t in a)))
    assert qkv.dtype == dtype and torch.equal(qkv, wide.to(dtype))
    made = qkv_projection_bwd(without_biases(a), qkv, {*GRADIENTS})
    assert {name: t.dtype for name, t in made.items()} == dict(x=dtype, weight=torch.float32, bias=torch.float32)


def test_unwanted_gradients_are_not_made() -> None:
    a = without_biases(QkvProjection(torch.randn(5, 4), *parameters(6, 4, torch.float32)))
    dqkv = torch.randn(5, 18)
    for wants in ({"x"}, {"weight"}, {"bias"}, set()):
        made = qkv_projection_bwd(a if "weight" in wants else a._replace(x=None), dqkv, wants)
        assert made.keys() == wants


def test_no_tokens() -> None:
    a = QkvProjection(torch.randn(0, 4), *parameters(6, 4, torch.float32))
    qkv = qkv_projection_fwd(a)
    made = qkv_projection_bwd(without_biases(a), qkv, {*GRADIENTS})
    assert qkv.shape == (0, 18) and made["x"].shape == (0, 4) and not made["weight"].any() and not made["bias"].any()
