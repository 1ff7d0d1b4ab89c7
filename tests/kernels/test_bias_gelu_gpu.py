"""The Triton kernels of bias_gelu on a GPU: every half-precision number, BERT's shapes, gradients, repeatability."""

import pytest
import torch
from torch import Tensor

from bert_fast import ops
from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.tolerances import SHORT_FORM_UNITS

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = ("y", "dx", "dbias")


def _run(inputs: tuple[Tensor, Tensor], dy: Tensor, hidden_act: str, backend: str) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = ops.bias_activation(*leaves, hidden_act=hidden_act, backend=backend)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


# Every width and every activation is compiled anew: all of them at one width, all widths with one of them.
CASES = [("gelu", shape) for shape in ((1, 3072), (4099, 3072), (16384, 4096), (517, 1001))]
CASES += [(hidden_act, (4099, 3072)) for hidden_act in ("gelu_new", "relu", "silu", "tanh")]


@pytest.mark.parametrize(("hidden_act", "shape"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(shape: tuple[int, int], dtype: torch.dtype, hidden_act: str) -> None:
    x, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    inputs = (x, torch.randn(shape[1], device="cuda").to(dtype))
    truth = _run(tuple(t.double() for t in inputs), dy.double(), hidden_act, "reference")
    actual = _run(inputs, dy, hidden_act, "triton")
    for name, *outputs in zip(NAMES, actual, _run(inputs, dy, hidden_act, "torch"), truth, strict=True):
        assert_close_to_truth("bias_gelu", name, *outputs)
    assert all(map(torch.equal, actual, _run(inputs, dy, hidden_act, "triton"))), "two runs differ"


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "silu", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_is_rounded_well(dtype: torch.dtype, hidden_act: str) -> None:
    """As the interpreter's test of the device functions, with the GPU's own exponential and its rounding."""
    x = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    x = x[x.isfinite()].view(-1, 64)
    y = ops.bias_activation(x, hidden_act=hidden_act, backend="triton").double()
    expected = ACTIVATIONS[hidden_act].forward(x.double())
    bits, smallest = (7, -126) if dtype == torch.bfloat16 else (10, -14)
    unit = torch.exp2(expected.abs().clamp_min(2.0**smallest).log2().floor() - bits)
    fits = expected.abs() <= torch.finfo(dtype).max
    assert ((y - expected).abs() / unit)[fits].max() <= 0.5 + SHORT_FORM_UNITS[dtype]
