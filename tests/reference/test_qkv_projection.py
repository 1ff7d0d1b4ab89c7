"""qkv_projection: gradcheck of the explicit backward, forward against torch, wider parameters, no tokens."""

import pytest
import torch
import torch.nn.functional as F

from bert_fast.reference.qkv_projection import qkv_projection_bwd, qkv_projection_fwd
from bert_fast.testing.explicit import explicit_function


def parameters(width: int, hidden: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """wq, bq, wk, bk, wv, bv."""
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3) for shape in ((width, hidden), width)]


@pytest.mark.parametrize("has_bias", [True, False])
def test_gradcheck(has_bias: bool) -> None:
    def forward(x, *given):
        saved = tuple(t.detach() for t in (x, *given[::2]))
        return (qkv_projection_fwd(x, *given),), saved

    def backward(saved, dqkv):
        dx, dweight, dbias = qkv_projection_bwd(dqkv, *saved, True, True, has_bias)
        assert (dbias is not None) == has_bias
        dbiases = dbias.chunk(3) if has_bias else (None,) * 3
        return dx, *(d for pair in zip(dweight.chunk(3), dbiases, strict=True) for d in pair)

    given = parameters(6, 4)
    if not has_bias:
        given[1::2] = [None] * 3
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(explicit_function(forward, backward), (x, *given))


def test_it_is_three_linears() -> None:
    x, given = torch.randn(5, 4, dtype=torch.float64), parameters(6, 4)
    projected = qkv_projection_fwd(x, *given).chunk(3, dim=1)
    for got, weight, bias in zip(projected, given[::2], given[1::2], strict=True):
        torch.testing.assert_close(got, F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_parameters_beside_half_precision(dtype: torch.dtype) -> None:
    x, given = torch.randn(5, 4).to(dtype), [p.detach() for p in parameters(6, 4, torch.float32)]
    qkv = qkv_projection_fwd(x, *given)
    wide = qkv_projection_fwd(x.double(), *(p.double() for p in given))
    assert qkv.dtype == dtype and torch.equal(qkv, wide.to(dtype))
    gradients = qkv_projection_bwd(qkv, x, *given[::2])
    assert [t.dtype for t in gradients] == [dtype, torch.float32, torch.float32]


def test_unwanted_gradients_are_none() -> None:
    x, given = torch.randn(5, 4), parameters(6, 4, torch.float32)
    dqkv = torch.randn(5, 18)
    for wants in ((True, False, False), (False, True, False), (False, False, True), (False,) * 3):
        made = qkv_projection_bwd(dqkv, x if wants[1] else None, *given[::2], *wants)
        assert [t is not None for t in made] == list(wants)


def test_no_tokens() -> None:
    x, given = torch.randn(0, 4), parameters(6, 4, torch.float32)
    qkv = qkv_projection_fwd(x, *given)
    dx, dweight, dbias = qkv_projection_bwd(qkv, x, *given[::2])
    assert qkv.shape == (0, 18) and dx.shape == (0, 4) and not dweight.any() and not dbias.any()
