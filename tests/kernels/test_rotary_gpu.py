"""The Triton kernel of rotary on a GPU, at full shapes: values and gradients, in place and not; the same bits twice."""

import pytest
import torch

from bert_fast import ops
from bert_fast.reference.rotary import Rotary, rotary_bwd, rotary_fwd
from bert_fast.testing.compare import assert_close_to_truth

pytestmark = pytest.mark.gpu

SHAPES = [(16384, 3, 12, 64), (4099, 3, 16, 64), (1, 3, 12, 64), (515, 3, 5, 30), (33, 7, 128)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "shape", [(16384, 3, 12, 64), (4099, 3, 16, 64), (1, 3, 12, 64), (515, 3, 5, 30), (33, 7, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...], inplace: bool, interleaved: bool) -> None:
    x, dy = torch.randn(2, *shape, device="cuda").to(dtype).unbind()
    inv_freq = 10000.0 ** -torch.linspace(0, 1, shape[-1] // 2, device="cuda")
    cos, sin = ops.rotary_tables(inv_freq, torch.arange(shape[0], device="cuda") % 512)
    runs = []
    for _ in range(2):
        leaf = x.detach().clone().requires_grad_()
        y = ops.rotary(leaf * 1, cos, sin, interleaved=interleaved, inplace=inplace, backend="triton")
        runs.append([y.detach(), torch.autograd.grad(y, leaf, dy)[0]])
    assert all(map(torch.equal, *runs)), "two runs differ"
    parts = [t if t.dim() == 4 else t[:, None] for t in (x, dy)]
    for name, actual, given, function in zip(
        ("y", "dqkv"), runs[0], parts, (rotary_fwd, lambda a: rotary_bwd(a, a.qkv)["qkv"]), strict=True
    ):
        plain = function(Rotary(given, cos, sin, interleaved))
        truth = function(Rotary(given.double(), cos.double(), sin.double(), interleaved))
        assert_close_to_truth("rotary", name, actual.view(given.shape), plain, truth)
