"""The Triton back-end of gated_mlp on a GPU, at BERT's shapes: values, gradients, masks, repeatability."""

import pytest
import torch
from torch import Tensor, nn

from bert_fast import ops
from bert_fast.storage import join_memory
from bert_fast.testing.compare import assert_close_to_truth

pytestmark = pytest.mark.gpu

NAMES = ("y", "dx", "dgate_weight", "dup_weight", "ddown_weight")
SHAPES = [(4099, 768, 3072), (16384, 1024, 4096), (4096, 768, 2048), (1, 768, 3072), (517, 1001, 333)]
SEED = 2**40 + 5


def _inputs(tokens: int, hidden: int, wide: int, dtype: torch.dtype, of_weights: torch.dtype | None = None):  # type: ignore[no-untyped-def]
    x, dy = (torch.randn(tokens, hidden, device="cuda").to(dtype) for _ in range(2))
    shapes = ((wide, hidden), (wide, hidden), (hidden, wide))
    weights = [(torch.randn(n, k, device="cuda") * k**-0.5).to(of_weights or dtype) for n, k in shapes]
    return [x, *weights], dy


def _run(
    inputs: list[Tensor], dy: Tensor, backend: str, hidden_act: str = "silu", save_pre: bool = True, p: float = 0.0,
    joins: bool = True,
) -> list[Tensor]:  # fmt: skip
    x, gate, up, down = leaves = [nn.Parameter(t.detach().clone()) for t in inputs]
    if joins:
        join_memory(gate, up)
    tokens = torch.arange(len(x), dtype=torch.int32, device="cuda")
    y = ops.gated_mlp(
        x, gate, None, up, None, down, hidden_act=hidden_act, save_pre=save_pre, dropout_p=p, backend=backend,
        seed=torch.tensor([SEED], device="cuda"), coords=torch.stack((tokens // 512, tokens % 512), 1), site=7,
    )  # fmt: skip
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _check(inputs: list[Tensor], dy: Tensor, **options) -> list[Tensor]:  # type: ignore[no-untyped-def]
    truth = _run([t.double() for t in inputs], dy.double(), "reference", **options)
    actual = _run(inputs, dy, "triton", **options)
    for name, *outputs in zip(NAMES, actual, _run(inputs, dy, "torch", **options), truth, strict=True):
        assert_close_to_truth("gated_mlp", name, *outputs)
    assert all(map(torch.equal, actual, _run(inputs, dy, "triton", **options))), "two runs differ"
    return actual


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("p", "joins"), [(0.0, True), (0.1, False)])
def test_values_and_gradients(shape: tuple[int, int, int], dtype: torch.dtype, p: float, joins: bool) -> None:
    _check(*_inputs(*shape, dtype), p=p, joins=joins)


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "relu", "silu", "tanh"])
@pytest.mark.parametrize("save_pre", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_activations(hidden_act: str, save_pre: bool, dtype: torch.dtype) -> None:
    _check(*_inputs(515, 768, 3072, dtype), hidden_act=hidden_act, save_pre=save_pre, p=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("joins", [True, False])
def test_fp32_parameters(dtype: torch.dtype, joins: bool) -> None:
    actual = _check(*_inputs(4099, 768, 3072, dtype, torch.float32), joins=joins)
    assert all(gradient.dtype == torch.float32 for gradient in actual[2:])
    assert not torch.equal(actual[2], actual[2].to(dtype).float()), "rounded to half precision on the way"
