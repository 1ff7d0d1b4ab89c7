"""qkv_projection on a GPU: BERT's shapes, parameters as neighbours or not, gradients, repeatability."""

import pytest
import torch
from torch import Tensor, nn

from bert_fast import ops
from bert_fast.storage import are_neighbours, join_memory, one_tensor, separate_memory
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
    join_memory(*parameters[::2])
    join_memory(*parameters[1::2])
    together = [_run(inputs, dqkv, "triton") for _ in range(2)]
    for results in together:
        assert all(torch.equal(results[name], apart[name]) for name in apart), "other bits, or two runs differ"


def test_neighbours_on_a_gpu_have_storages_of_their_own() -> None:
    projections = [nn.Linear(64, 64).cuda() for _ in range(3)]
    weights = [projection.weight for projection in projections]
    values = [w.detach().clone() for w in weights]
    join_memory(*weights)
    assert are_neighbours(*weights) and one_tensor(*(w.detach() for w in weights)).data_ptr() == weights[0].data_ptr()
    for w, value in zip(weights, values, strict=True):
        assert torch.equal(w, value) and w.untyped_storage().nbytes() == w.nbytes
        w.detach().record_stream(torch.cuda.Stream())
    separate_memory(*weights)
    assert not are_neighbours(*weights)
    assert all(torch.equal(w, value) for w, value in zip(weights, values, strict=True))
