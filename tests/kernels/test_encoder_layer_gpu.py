"""A layer on the Triton back-end on a GPU, at BERT's shapes: the bits of its ops, masks, gradients, repeatability."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from bert_fast.modules import layer as module
from bert_fast.modules.call import Call
from bert_fast.modules.layer import BertLayer
from bert_fast.ops import Packing

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
    leaf = x.clone().requires_grad_()
    y = layer(leaf, call=call)
    dy = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (leaf, *layer.parameters()), dy)]


@pytest.mark.parametrize("num_rows", [None, 300])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bits_of_single_ops(size: tuple[int, int, int], dtype: torch.dtype, num_rows: int | None) -> None:
    layer, call = _layer(*size, dtype), _call(num_rows)
    x = torch.randn(call.packing.coords.shape[0], size[0], device="cuda").to(dtype)
    whole, again = _run(layer, call, x), _run(layer, call, x)
    with mock.patch.object(module, "run_whole", return_value=None):
        single = _run(layer, call, x)
    assert all(map(torch.equal, whole, again)), "two runs differ"
    assert all(map(torch.equal, whole, single))
