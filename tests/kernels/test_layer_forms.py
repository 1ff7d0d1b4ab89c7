"""A layer called again and again while it, the batch and PyTorch's state change: always the bits of its ops."""

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from bert_fast import use_backend
from bert_fast.modules.layer import BertLayer
from bert_fast.modules.whole_layer import run_whole
from bert_fast.ops._layer_programs import Form
from tests.kernels.layer_changes import CHANGES, CONFIG, moved, unaligned
from tests.kernels.test_projected_layers import make_call

pytestmark = pytest.mark.interpreter

SEQUENCES, CALLS = 6, 14


def call(layer: Any, given: Tensor, lengths: tuple[int, ...], upstream: Tensor | None, between: Any) -> list[Any]:
    """y, and gradients if any are made."""
    x = given.detach().requires_grad_(given.requires_grad)
    layer.zero_grad()
    y = layer(x, call=make_call(lengths))
    if upstream is None or not y.requires_grad:
        return [y.detach()]
    between()
    y.backward(upstream)
    return [y.detach(), x.grad, *[p.grad for p in layer.parameters()]]


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_any_order_of_calls_and_changes(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ours: Any = BertLayer(CONFIG, 0).train()
    theirs = copy.deepcopy(ours)
    for number in range(CALLS):
        torch.manual_seed(number)
        lengths = tuple(rng.choice((1, 2, 5, 9)) for _ in range(rng.choice((1, 2, 3))))
        x = torch.randn(sum(lengths), 32)
        if rng.random() < 0.2:
            x = torch.cat((x, x), dim=1)[:, :32]  # not contiguous
        x.requires_grad_(rng.random() < 0.7)
        change = rng.choice(CHANGES) if rng.random() < 0.7 else None
        is_between = change in (moved, unaligned) and rng.random() < 0.5
        upstream = torch.randn(sum(lengths), 32) if rng.random() < 0.8 else None
        state = rng.getstate()
        results = []
        for layer, by_ops in ((ours, False), (theirs, True)):
            rng.setstate(state)

            def changed(layer: Any = layer, change: Any = change) -> None:
                if change is not None:
                    change(layer, rng)

            if not is_between:
                changed()
            with use_backend("triton"), torch.set_grad_enabled(upstream is not None):
                between = changed if is_between else lambda: None
                if by_ops:
                    with mock.patch("bert_fast.modules.layer.run_whole", return_value=None):
                        results.append(call(layer, x, lengths, upstream, between))
                else:
                    results.append(call(layer, x, lengths, upstream, between))
        for place, (found, expected) in enumerate(zip(*results, strict=True)):
            assert found is expected is None or torch.equal(found, expected), (number, change, place)


def test_forms_are_found_again_and_keep_no_memory() -> None:
    """Calls that differ in lengths alone make one form, which keeps neither a parameter nor an input alive."""
    layer: Any = BertLayer(CONFIG, 0).train()
    made: list[Form] = []
    remember = Form.remember
    noted = mock.patch.object(Form, "remember", lambda form, given: made.append(form) or remember(form, given))
    with noted, use_backend("triton"):
        for lengths in ((3, 2), (7,), (1, 1, 5), (4, 4)):
            x = torch.randn(sum(lengths), 32, requires_grad=True)
            layer(x, call=make_call(lengths)).sum().backward()
    assert len(made) == 1
    kept = [weakref.ref(one) for one in (x, layer.output.dense.weight)]
    layer.output.dense.weight = nn.Parameter(torch.zeros(32, 48))
    del x
    gc.collect()
    assert [one() for one in kept] == [None, None]


def at_odd_addresses(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


def with_other_strides(tensor: Tensor) -> Tensor:
    if tensor.dim() != 2 or not tensor.is_floating_point():
        return tensor.clone()
    return torch.empty(tensor.shape[0], 2 * tensor.shape[1], dtype=tensor.dtype)[:, : tensor.shape[1]].copy_(tensor)


@pytest.mark.parametrize("elsewhere", [at_odd_addresses, with_other_strides])
def test_backward_looks_again_at_what_hooks_return(elsewhere: Callable[[Tensor], Tensor]) -> None:
    """Tensors that were packed away and come back elsewhere, between ordinary calls: the same gradients."""
    torch.manual_seed(0)
    layer: Any = BertLayer(CONFIG, 0).train()
    found = []
    for is_hooked in (False, True, False, True):
        torch.manual_seed(1)
        x = torch.randn(7, 32, requires_grad=True)
        layer.zero_grad()
        with use_backend("triton"):
            if is_hooked:
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), elsewhere):
                    y = layer(x, call=make_call((4, 3)))
            else:
                y = layer(x, call=make_call((4, 3)))
            y.backward(torch.ones_like(y))
        found.append([y.detach(), x.grad, *[p.grad for p in layer.parameters()]])
    for other in found[1:]:
        for one, expected in zip(other, found[0], strict=True):
            assert one is not None and expected is not None and torch.equal(one, expected)


def test_values_that_decide_what_is_saved_are_looked_at_again() -> None:
    """A LayerNorm's output tells its input only while no weight is 0."""
    layer: Any = BertLayer(CONFIG, 0).train()
    for is_zero in (False, True, False):
        with torch.no_grad():
            layer.output.LayerNorm.weight[3] = 0.0 if is_zero else 1.0
        results = []
        for by_ops in (False, True):
            torch.manual_seed(1)
            x = torch.randn(5, 32, requires_grad=True)
            way = {"return_value": None} if by_ops else {"wraps": run_whole}
            with use_backend("triton"), mock.patch("bert_fast.modules.layer.run_whole", **way):
                results.append(call(layer, x, (3, 2), torch.ones(5, 32), lambda: None))
        for found, expected in zip(*results, strict=True):
            assert torch.equal(found, expected), is_zero


@pytest.mark.parametrize("name", ["output.dense.weight", "output.LayerNorm.weight"])
@pytest.mark.parametrize("calls", [0, 2])
def test_a_parameter_that_was_cast_after_forward_raises(name: str, calls: int) -> None:
    layer: Any = BertLayer(CONFIG, 0).train()
    with use_backend("triton"):
        for _ in range(calls):  # whether backward was looked up before or not
            layer(torch.randn(5, 32, requires_grad=True), call=make_call((2, 3))).sum().backward()
        y = layer(torch.randn(5, 32, requires_grad=True), call=make_call((2, 3)))
        p = layer.get_parameter(name)
        p.data = p.data.bfloat16()
        with pytest.raises(
            RuntimeError, match=r"expected parameters of torch\.float32 in backward.*got torch\.bfloat16"
        ):
            y.sum().backward()
