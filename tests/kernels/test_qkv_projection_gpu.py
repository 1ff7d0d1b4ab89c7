"""qkv_projection on a GPU: BERT's shapes, parameters as neighbours or not, gradients, repeatability."""

import pytest
import torch
from torch import Tensor, nn

from bert_fast import ops
from bert_fast.storage import join_storage
from bert_fast.testing.compare import assert_close_to_truth

pytestmark = pytest.mark.gpu

NAMES = ("dx", "dwq", "dbq", "dwk", "dbk", "dwv", "dbv")


def _run(inputs: list[Tensor], dqkv: Tensor, backend: str) -> dict[str, Tensor]:
    qkv = ops.qkv_projection(*inputs, backend=backend)
    return {"qkv": qkv.detach(), **dict(zip(NAMES, torch.autograd.grad(qkv, inputs, dqkv), strict=True))}


@pytest.mark.parametrize("shape", [(4096, 768, 768), (4099, 1024, 1024), (1, 384, 384), (517, 100, 36)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("are_fp32", [False, True])
def test_values_and_gradients(shape: tuple[int, int, int], dtype: torch.dtype, are_fp32: bool) -> None:
    tokens, hidden_size, width = shape
    of_parameters = torch.float32 if are_fp32 else dtype
    x, dqkv = (torch.randn(tokens, n, device="cuda").to(dtype) for n in (hidden_size, 3 * width))
    shapes = [(width, hidden_size), (width,)] * 3
    parameters = [nn.Parameter((torch.randn(s, device="cuda") * s[-1] ** -0.5).to(of_parameters)) for s in shapes]
    inputs = [x.requires_grad_(), *parameters]
    truth = _run([t.detach().double().requires_grad_() for t in inputs], dqkv.double(), "reference")
    apart = _run(inputs, dqkv, "triton")
    plain = _run(inputs, dqkv, "torch")
    for name in truth:
        assert_close_to_truth("qkv_projection", name, apart[name], plain[name], truth[name])
    join_storage(*parameters[::2])
    join_storage(*parameters[1::2])
    together = [_run(inputs, dqkv, "triton") for _ in range(2)]
    for results in together:
        assert all(torch.equal(results[name], apart[name]) for name in apart), "other bits, or two runs differ"
