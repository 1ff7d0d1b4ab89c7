"""linear: the torch back-end against the reference, gradients, edge cases, registration, both GEMM libraries."""

import pytest
import torch
from torch.nn import functional as F

from bert_fast import ops
from bert_fast.aten import _gemm
from bert_fast.testing.compare import assert_close_to_truth


def _run(tensors, backend):
    x, weight, bias = (None if t is None else t.detach().clone().requires_grad_() for t in tensors[:3])
    y = F.linear(x, weight, bias) if backend == "plain" else ops.linear(x, weight, bias, backend=backend)
    y.backward(tensors[3])
    result = {"y": y, "dx": x.grad, "dweight": weight.grad}
    return result if bias is None else result | {"dbias": bias.grad}


def _inputs(tokens, width_in, width_out, dtype, has_bias=True):
    shapes = ((tokens, width_in), (width_out, width_in), (width_out,), (tokens, width_out))
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    return tensors if has_bias else [*tensors[:2], None, tensors[3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 13, 31), (64, 48, 192), (0, 8, 16)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_torch_backend_matches_the_reference(dtype, shape, has_bias):
    tensors = _inputs(*shape, dtype, has_bias)
    actual, plain = (_run(tensors, backend) for backend in ("torch", "plain"))
    truth = _run([None if t is None else t.double() for t in tensors], "reference")
    for name in actual:
        assert_close_to_truth("linear", name, actual[name], plain[name], truth[name])


@pytest.mark.parametrize("by_onednn", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 3, 5), (37, 24, 65), (129, 384, 96)])
def test_both_gemm_libraries(by_onednn, shape, monkeypatch):
    if by_onednn and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(_gemm, "_mkl_lacks_avx512", lambda: by_onednn)
    rows, inner, columns = shape
    a, b, bias, addend = (
        torch.randn(rows, inner),
        torch.randn(inner, columns),
        torch.randn(columns),
        torch.randn(rows, columns),
    )
    truth = a.double() @ b.double()
    for name, actual, plain, wanted in (
        ("product", _gemm.matmul(a, b), a @ b, truth),
        ("transposed", _gemm.matmul(a.t().contiguous().t(), b.t().contiguous().t()), a @ b, truth),
        ("bias", _gemm.matmul(a, b, bias), torch.addmm(bias, a, b), truth + bias.double()),
        ("add", _gemm.matmul_add(a, b, addend.clone()), torch.addmm(addend, a, b), truth + addend.double()),
    ):
        assert_close_to_truth("gemm", name, actual, plain, wanted)


def test_strided_and_expanded_inputs():
    x, weight = torch.randn(6, 16)[:, ::2], torch.randn(1, 8).expand(5, 8)
    torch.testing.assert_close(ops.linear(x, weight), F.linear(x, weight))
    dy = torch.ones(()).expand(6, 5)
    x = x.clone().requires_grad_()
    ops.linear(x, weight).backward(dy)
    torch.testing.assert_close(x.grad, dy @ weight)


def test_gradcheck_opcheck_and_compile():
    x, weight, bias, _ = (t.requires_grad_() for t in _inputs(3, 4, 5, torch.float64))
    assert torch.autograd.gradcheck(ops.linear, (x, weight, bias))
    torch.library.opcheck(torch.ops.bert_fast.linear_fwd, (x, weight, bias, "auto"))
    compiled = torch.compile(ops.linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, bias), ops.linear(x, weight, bias))


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"weight: expected shape \[N, 4\], got \[5, 3\]"):
        ops.linear(torch.zeros(2, 4), torch.zeros(5, 3))
