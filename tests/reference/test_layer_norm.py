"""LayerNorm: gradcheck, against torch, rows far from 0, dtypes."""

import pytest
import torch
import torch.nn.functional as F

from bert_fast.reference.layer_norm import LayerNorm, layer_norm_bwd, layer_norm_fwd
from bert_fast.testing.explicit import explicit_function

EPS = 1e-12


def test_gradcheck() -> None:
    def forward(x, weight, bias):
        y, mean, rstd = layer_norm_fwd(LayerNorm(x, weight, bias, EPS))
        return (y,), (x.detach(), weight.detach(), mean.detach(), rstd.detach())

    def backward(saved, dy):
        x, weight, mean, rstd = saved
        made = layer_norm_bwd(LayerNorm(x, weight, None, None), dy, mean, rstd)
        return made["x"], made["weight"], made["bias"]

    x, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 7), (7,), (7,)))
    assert torch.autograd.gradcheck(explicit_function(forward, backward), (x, weight, bias))


@pytest.mark.parametrize("shift", [0.0, -20.0])
@pytest.mark.parametrize("columns", [1, 2, 17, 768])
def test_equals_torch(columns: int, shift: float) -> None:
    x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((5, columns), (columns,), (columns,)))
    x += shift
    y, mean, rstd = layer_norm_fwd(LayerNorm(x, weight, bias, EPS))
    torch.testing.assert_close(y, F.layer_norm(x, (columns,), weight, bias, EPS))
    torch.testing.assert_close(mean, x.mean(1))
    torch.testing.assert_close(rstd, (x.var(1, unbiased=False) + EPS).rsqrt())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    x, dy = (torch.randn(3, 32) - 20).to(dtype), torch.randn(3, 32).to(dtype)
    weight, bias = torch.randn(2, 32).to(dtype).unbind()
    a = LayerNorm(x, weight, bias, EPS)
    y, mean, rstd = layer_norm_fwd(a)
    assert (y.dtype, mean.dtype, rstd.dtype) == (dtype, torch.float32, torch.float32)
    assert torch.equal(y, layer_norm_fwd(LayerNorm(x.float(), weight.float(), bias.float(), EPS))[0].to(dtype))
    assert {n: g.dtype for n, g in layer_norm_bwd(a, dy, mean, rstd).items()} == dict(x=dtype, weight=dtype, bias=dtype)
