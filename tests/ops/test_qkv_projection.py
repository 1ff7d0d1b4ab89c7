"""qkv_projection: the torch back-end against the reference, gradients, edge cases, registration."""

import pytest
import torch
from torch.nn import functional as F

from bert_fast import ops
from bert_fast.testing.compare import assert_close_to_truth


def _run(tensors, backend):
    inputs = [t.detach().clone().requires_grad_() for t in tensors[:7]]
    if backend == "plain":
        x, *parameters = inputs
        outputs = tuple(F.linear(x, parameters[i], parameters[i + 1]) for i in (0, 2, 4))
    else:
        outputs = ops.qkv_projection(*inputs, backend=backend)
    torch.autograd.backward(outputs, tensors[7:])
    names = ("dx", "dwq", "dbq", "dwk", "dbk", "dwv", "dbv")
    return dict(zip(("q", "k", "v"), outputs, strict=True)) | {n: t.grad for n, t in zip(names, inputs, strict=True)}


def _inputs(tokens, hidden, width, dtype):
    shapes = [(tokens, hidden), *[(width, hidden), (width,)] * 3, *[(tokens, width)] * 3]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 13, 24), (33, 48, 48), (0, 8, 16)])
def test_torch_backend_matches_the_reference(dtype, shape):
    tensors = _inputs(*shape, dtype)
    actual, plain = (_run(tensors, backend) for backend in ("torch", "plain"))
    truth = _run([t.double() for t in tensors], "reference")
    for name in actual:
        assert_close_to_truth("qkv_projection", name, actual[name], plain[name], truth[name])


def test_gradcheck_opcheck_and_compile():
    inputs = [t.requires_grad_() for t in _inputs(3, 4, 6, torch.float64)[:7]]
    assert torch.autograd.gradcheck(ops.qkv_projection, inputs)
    torch.library.opcheck(torch.ops.bert_fast.qkv_projection_fwd, (*inputs, "auto"))
    compiled = torch.compile(ops.qkv_projection, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), ops.qkv_projection(*inputs))


def test_an_unused_output_gives_zero_gradients():
    inputs = [t.requires_grad_() for t in _inputs(3, 4, 6, torch.float64)[:7]]
    ops.qkv_projection(*inputs)[0].sum().backward()
    assert torch.equal(inputs[3].grad, torch.zeros(6, 4, dtype=torch.float64))


def test_bad_shapes_are_named():
    tensors = _inputs(3, 4, 6, torch.float32)[:7]
    tensors[3] = torch.zeros(6, 5)
    with pytest.raises(ValueError, match=r"wk: expected shape \[N, 4\], got \[6, 5\]"):
        ops.qkv_projection(*tensors)
