"""The Triton back-end of linear_gelu on a GPU, at BERT's shapes: values, gradients, repeatability."""

import pytest
import torch
from torch import Tensor

from bert_fast import ops
from bert_fast.testing.compare import assert_close_to_truth

pytestmark = pytest.mark.gpu

NAMES = ("y", "dx", "dweight", "dbias")
SHAPES = [(4099, 768, 3072), (16384, 1024, 4096), (4096, 768, 768), (1, 768, 3072), (517, 1001, 333)]


def _inputs(tokens: int, width_in: int, width_out: int, dtype: torch.dtype, wide: torch.dtype | None = None):  # type: ignore[no-untyped-def]
    x, dy = (torch.randn(tokens, width, device="cuda").to(dtype) for width in (width_in, width_out))
    weight = torch.randn(width_out, width_in, device="cuda") * width_in**-0.5
    return [x, weight.to(wide or dtype), torch.randn(width_out, device="cuda").to(wide or dtype)], dy


def _run(
    inputs: list[Tensor], dy: Tensor, backend: str, hidden_act: str = "gelu", save_pre: bool = True
) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = ops.linear_activation(*leaves, hidden_act=hidden_act, save_pre=save_pre, backend=backend)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _check(inputs: list[Tensor], dy: Tensor, hidden_act: str = "gelu", save_pre: bool = True) -> list[Tensor]:
    truth = _run([t.double() for t in inputs], dy.double(), "reference", hidden_act, save_pre)
    actual = _run(inputs, dy, "triton", hidden_act, save_pre)
    for name, *outputs in zip(NAMES, actual, _run(inputs, dy, "torch", hidden_act, save_pre), truth, strict=True):
        assert_close_to_truth("linear_gelu", name, *outputs)
    assert all(map(torch.equal, actual, _run(inputs, dy, "triton", hidden_act, save_pre))), "two runs differ"
    return actual


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_and_gradients(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    _check(*_inputs(*shape, dtype))


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "relu", "silu", "tanh"])
@pytest.mark.parametrize("save_pre", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_activations(hidden_act: str, save_pre: bool, dtype: torch.dtype) -> None:
    _check(*_inputs(515, 768, 3072, dtype), hidden_act, save_pre)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_parameters(dtype: torch.dtype) -> None:
    actual = _check(*_inputs(4099, 768, 3072, dtype, torch.float32))
    assert all(gradient.dtype == torch.float32 for gradient in actual[2:])
    assert not torch.equal(actual[2], actual[2].to(dtype).float()), "rounded to half precision on the way"
