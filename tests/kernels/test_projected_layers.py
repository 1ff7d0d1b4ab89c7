"""Layers whose query, key or value is more than its parameters: the rest is one program, with the bits of its ops."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from bert_fast import use_backend
from bert_fast.errors import DerivativeError
from bert_fast.modules.call import Call, first_rows
from bert_fast.modules.layer import BertLayer
from bert_fast.ops.packing import Packing
from tests.kernels.layer_changes import CONFIG

pytestmark = pytest.mark.interpreter


class Adapted(nn.Module):
    """A linear layer with a thin way around it, as LoRA's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.narrow, self.wide = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.wide(self.narrow(x))


def make_layer(who: str) -> Any:
    torch.manual_seed(0)
    layer = BertLayer(CONFIG, 0).train()
    heads: Any = layer.attention.self
    if who == "adapters":
        heads.query, heads.value = Adapted(heads.query), Adapted(heads.value)
    else:
        heads.key.register_forward_hook(lambda module, given, output: output * 1.5)
    return layer


def make_call(lengths: tuple[int, ...], has_rows: bool = False) -> Call:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    call = Call(Packing.from_cu_seqlens(ends, max(lengths), sum(lengths)), torch.tensor([7]))
    return call.with_rows(first_rows(call.packing)) if has_rows else call


def run(layer: Any, lengths: tuple[int, ...], by_ops: bool, has_rows: bool = False) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    x = torch.randn(sum(lengths), 32, requires_grad=True)
    layer.zero_grad()
    call = make_call(lengths, has_rows)
    with use_backend("triton"):
        if by_ops:
            with mock.patch("bert_fast.modules.layer.run_whole", return_value=None):
                y = layer(x, call=call)
        else:
            y = layer(x, call=call)
        y.backward(torch.randn(y.shape))
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("has_rows", [False, True], ids=["all tokens", "some rows"])
@pytest.mark.parametrize("who", ["adapters", "a hook"])
def test_bits_are_those_of_the_ops(who: str, has_rows: bool) -> None:
    from bert_fast.triton import encoder_layer

    layer = make_layer(who)
    encoder_layer._of_model.forget()
    for lengths in ((5, 3, 7), (1, 2), (9,)):
        found = run(layer, lengths, by_ops=False, has_rows=has_rows)
        expected = run(copy.deepcopy(layer), lengths, by_ops=True, has_rows=has_rows)
        assert found.keys() == expected.keys()
        for name, one in found.items():
            other = expected[name]
            assert (one is None) == (other is None), name
            if one is not None and other is not None:
                assert one.dtype == other.dtype and one.shape == other.shape, name
                if name == "x" and has_rows:  # what the rows add to it is added up in another order
                    torch.testing.assert_close(one, other)
                else:
                    assert torch.equal(one, other), name
    kinds = list(encoder_layer._of_model._kinds.values())
    assert len(kinds) == 2 and all(kind.runners for kind in kinds), "forward and backward ran by programs"


@pytest.mark.parametrize("has_rows", [False, True], ids=["all tokens", "some rows"])
def test_a_profiler_changes_nothing(has_rows: bool) -> None:
    layer = make_layer("adapters")
    expected = run(layer, (5, 3), by_ops=False, has_rows=has_rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        found = run(layer, (5, 3), by_ops=False, has_rows=has_rows)
    for name, one in found.items():
        other = expected[name]
        assert one is other is None or (one is not None and other is not None and torch.equal(one, other)), name


def test_second_derivatives_are_refused() -> None:
    layer = make_layer("adapters")
    x = torch.randn(4, 32, requires_grad=True)
    with use_backend("triton"):
        y = layer(x, call=make_call((4,)))
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises((RuntimeError, DerivativeError), match="second derivatives"):
            gradient.sum().backward()
