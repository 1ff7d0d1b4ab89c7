"""The Triton kernels of LayerNorm on a GPU, at BERT's shapes: values, gradients, repeatability."""

import pytest
import torch
from torch import Tensor

from bert_fast import ops
from bert_fast.testing.compare import assert_close_to_truth

pytestmark = pytest.mark.gpu

NAMES = ("y", "dx", "dweight", "dbias")


def _run(function, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:  # type: ignore[no-untyped-def]
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


@pytest.mark.parametrize("hidden_size", [384, 768, 1000, 1024, 8192])
@pytest.mark.parametrize("num_tokens", [1, 4099, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_and_gradients(hidden_size: int, num_tokens: int, dtype: torch.dtype) -> None:
    x, dy = (torch.randn(num_tokens, hidden_size, device="cuda").to(dtype) for _ in range(2))
    weight, bias = (torch.randn(hidden_size, device="cuda").to(dtype) for _ in range(2))
    inputs = [x, weight, bias]

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (hidden_size,), weight, bias, 1e-12)

    def fast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.layer_norm(x, weight, bias, backend="triton")

    truth = _run(plain, [t.double() for t in inputs], dy.double())
    actual = _run(fast, inputs, dy)
    for name, *outputs in zip(NAMES, actual, _run(plain, inputs, dy), truth, strict=True):
        assert_close_to_truth("layer_norm", name, *outputs)
    assert all(map(torch.equal, actual, _run(fast, inputs, dy))), "two runs differ"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_parameters(dtype: torch.dtype) -> None:
    x, dy = (torch.randn(4099, 768, device="cuda").to(dtype) for _ in range(2))
    inputs = [x, *torch.randn(2, 768, device="cuda").unbind()]

    def function(backend: str):  # type: ignore[no-untyped-def]
        return lambda x, weight, bias: ops.layer_norm(x, weight, bias, backend=backend)

    truth = _run(function("reference"), [t.double() for t in inputs], dy.double())
    for backend in ("triton", "torch"):
        results = zip(
            NAMES, _run(function(backend), inputs, dy), _run(function("reference"), inputs, dy), truth, strict=True
        )
        for name, *outputs in results:
            assert_close_to_truth("layer_norm", name, *outputs)
