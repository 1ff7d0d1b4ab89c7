"""A layer on the Triton back-end on a GPU, at BERT's shapes: its ops' values, masks, gradients, repeatability."""

import copy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from bert_fast.modules import layer as module
from bert_fast.modules.call import Call
from bert_fast.modules.layer import BertLayer
from bert_fast.ops import Packing
from bert_fast.testing.compare import assert_close_to_truth

pytestmark = pytest.mark.gpu

SIZES = [(384, 12, 1536), (768, 12, 3072), (1024, 16, 4096)]


def _layer(hidden: int, heads: int, intermediate: int, dtype: torch.dtype) -> BertLayer:
    config = SimpleNamespace(
        hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads, layer_norm_eps=1e-12,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, hidden_act="gelu",
    )  # fmt: skip
    return BertLayer(config, 0).to("cuda", dtype)


def _call(num_rows: int | None) -> Call:
    lengths = torch.randint(1, 129, (64,), device="cuda")
    keep = torch.arange(128, device="cuda")[None] < lengths[:, None]
    call = Call(Packing.from_keep_mask(keep), torch.tensor([77], device="cuda"))
    return call if num_rows is None else call.with_rows(torch.arange(num_rows, device="cuda") * 7)


def _run(layer: BertLayer, call: Call, x: Tensor) -> list[Tensor]:
    """Output and gradients, for an upstream gradient that every dtype holds."""
    leaf = x.clone().requires_grad_()
    y = layer(leaf, call=call)
    dy = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16().to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (leaf, *layer.parameters()), dy)]


@pytest.mark.parametrize("num_rows", [None, 300])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_of_single_ops(size: tuple[int, int, int], dtype: torch.dtype, num_rows: int | None) -> None:
    """Forward has their bits, backward their errors: where the layer adds a product onto a gradient, the library rounds
    once or twice as its kernel for the shape has it.
    """
    layer, call = _layer(*size, dtype), _call(num_rows)
    x = torch.randn(call.packing.coords.shape[0], size[0], device="cuda").to(dtype)
    whole, again = _run(layer, call, x), _run(layer, call, x)
    with mock.patch.object(module, "run_whole", return_value=None):
        single = _run(layer, call, x)
    assert all(map(torch.equal, whole, again)), "two runs differ"
    assert torch.equal(whole[0], single[0])
    truth = _run(copy.deepcopy(layer).double(), call, x.double())
    names = ("y", "dx", *(f"d{name}" for name, _ in layer.named_parameters()))
    for name, *values in zip(names, whole, single, truth, strict=True):
        assert_close_to_truth("encoder_layer", name, *values)
