"""linear_gelu: the torch back-end against the reference, gradients, edge cases, registration."""

import pytest
import torch
from torch.nn import functional as F

from bert_fast import ops
from bert_fast.testing.compare import assert_close_to_truth


def _run(tensors, approximate, backend):
    x, weight, bias = (None if t is None else t.detach().clone().requires_grad_() for t in tensors[:3])
    if backend == "plain":
        y = F.gelu(F.linear(x, weight, bias), approximate=approximate)
    else:
        y = ops.linear_gelu(x, weight, bias, approximate=approximate, backend=backend)
    y.backward(tensors[3])
    result = {"y": y, "dx": x.grad, "dweight": weight.grad}
    return result if bias is None else result | {"dbias": bias.grad}


def _inputs(tokens, width_in, width_out, dtype, has_bias=True):
    shapes = ((tokens, width_in), (width_out, width_in), (width_out,), (tokens, width_out))
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    return tensors if has_bias else [*tensors[:2], None, tensors[3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 13, 31), (64, 48, 192), (0, 8, 16)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_torch_backend_matches_the_reference(dtype, approximate, shape, has_bias):
    tensors = _inputs(*shape, dtype, has_bias)
    actual, plain = (_run(tensors, approximate, backend) for backend in ("torch", "plain"))
    truth = _run([None if t is None else t.double() for t in tensors], approximate, "reference")
    for name in actual:
        assert_close_to_truth("linear_gelu", name, actual[name], plain[name], truth[name])


def test_erf_and_tanh_are_different_functions():
    tensors = _inputs(16, 8, 8, torch.float64)
    erf, tanh = (_run(tensors, approximate, "torch")["y"] for approximate in ("none", "tanh"))
    assert 1e-5 < (erf - tanh).abs().max() < 1e-2


def test_gradcheck_opcheck_and_compile():
    x, weight, bias, _ = (t.requires_grad_() for t in _inputs(3, 4, 5, torch.float64))
    assert torch.autograd.gradcheck(ops.linear_gelu, (x, weight, bias))
    torch.library.opcheck(torch.ops.bert_fast.linear_gelu_fwd, (x, weight, bias, "gelu", True, "auto"))
    compiled = torch.compile(ops.linear_gelu, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, bias), ops.linear_gelu(x, weight, bias))


def test_autocast_casts_the_operands():
    x, weight, bias, _ = (t.requires_grad_() for t in _inputs(3, 4, 5, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.linear_gelu(x, weight, bias)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(2, 3, 4), torch.zeros(5, 4)), ValueError, r"x: expected shape \[T, K\], got \[2, 3, 4\]"),
        ((torch.zeros(2, 4), torch.zeros(5, 3)), ValueError, r"weight: expected shape \[N, 4\], got \[5, 3\]"),
        ((torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(4)), ValueError, r"bias: expected shape \[5\], got \[4\]"),
    ],
)
def test_bad_shapes_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        ops.linear_gelu(*arguments)


def test_unknown_approximation_is_named():
    with pytest.raises(ValueError, match="approximate: expected 'none' or 'tanh', got 'erf'"):
        ops.linear_gelu(torch.zeros(2, 4), torch.zeros(5, 4), approximate="erf")
