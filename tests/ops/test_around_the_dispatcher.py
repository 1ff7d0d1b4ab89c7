"""Calls that go around PyTorch's dispatcher: the same bits as through it, and only where nobody would miss them."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import ops
from bert_fast.errors import DerivativeError
from bert_fast.ops import _define, _register

from .test_every_op import SAMPLES, run

X, WEIGHT = torch.randn(3, 4), torch.randn(2, 4)


class Seen(TorchDispatchMode):
    """Notes the names of all ops that come by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that take the dispatcher, as they are called."""
    names: list[str] = []
    call = _register.Op._dispatch

    def noted(op: _register.Op, *arguments: Any) -> Any:
        names.append(op._qualified_name)
        return call(op, *arguments)

    monkeypatch.setattr(_register.Op, "_dispatch", noted)
    return names


@pytest.mark.parametrize("name", [name for name in SAMPLES if not name.startswith("optimizer")])
def test_bits_are_those_of_the_dispatcher(name: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SAMPLES[name].make(5)
    around = run(SAMPLES[name].function, arguments)
    assert not calls
    for module in (_register, _define, importlib.import_module("bert_fast.ops.rotary")):
        monkeypatch.setattr(module, "is_watched", lambda **_: True)
    through = run(SAMPLES[name].function, arguments)
    if name.startswith("linear_cross_entropy"):  # goes by an autograd function of its own
        calls.append(name)
    assert calls
    for ours, theirs in zip(around, through, strict=True):
        assert torch.equal(ours, theirs)


def test_plain_calls_go_around_it_with_and_without_gradients(calls: list[str]) -> None:
    ops.linear(X, WEIGHT)
    ops.linear(X, WEIGHT.clone().requires_grad_()).sum().backward()
    with torch.inference_mode():
        ops.linear(X, WEIGHT)
    assert not calls


@contextmanager
def tracing() -> Iterator[None]:
    torch.jit.trace(lambda x: ops.linear(x, WEIGHT), X, check_trace=False)
    yield


@pytest.mark.parametrize(
    "watching",
    [Seen, lambda: torch.device("cpu"), tracing, torch.profiler.profile],
    ids=["dispatch mode", "function mode", "tracing", "profiler"],
)
def test_who_watches_sees_the_op(calls: list[str], watching: Any) -> None:
    with watching():
        ops.linear(X, WEIGHT)
    assert calls


def test_modes_see_backward_too() -> None:
    with Seen() as seen:
        ops.linear(X, WEIGHT.clone().requires_grad_()).sum().backward()
    assert {"bert_fast::linear_fwd", "bert_fast::linear_bwd"} <= set(seen.names)


def test_transforms_of_functions_go_through_it(calls: list[str]) -> None:
    with pytest.raises(RuntimeError):  # without a rule for it PyTorch says so, instead of a wrong result
        torch.func.grad(lambda x: ops.linear(x, WEIGHT).sum())(X)
    assert calls


def test_tensors_that_transforms_left_behind_are_taken(calls: list[str]) -> None:
    left: list[Tensor] = []
    torch.func.grad(lambda x: left.append(x) or x.sum())(X)
    calls.clear()
    weight = WEIGHT.clone().requires_grad_()
    y = ops.linear(left[0], weight)
    assert calls and torch.equal(y, ops.linear(X, WEIGHT))
    y.sum().backward()
    assert torch.equal(weight.grad, X.sum(0).expand_as(WEIGHT))


class Wrapped(Tensor):
    """A subclass, whatever it does."""


def negated() -> Tensor:
    """A tensor whose memory holds the negatives of its values."""
    x = torch.complex(torch.zeros_like(X), -X).conj().imag
    assert x.is_neg() and torch.equal(x, X)
    return x


@pytest.mark.parametrize("x", [X.as_subclass(Wrapped), X.to("meta"), negated(), torch._efficientzerotensor(3, 4)],
                         ids=["subclass", "meta", "negative bit", "zero tensor"])  # fmt: skip
def test_tensors_that_are_not_plain_memory_go_through_it(calls: list[str], x: Tensor) -> None:
    y = ops.linear(x, WEIGHT.to(x.device))
    assert calls
    if not x.is_meta:
        assert torch.equal(y, ops.linear(x + 0.0, WEIGHT))


def test_saved_tensors_pass_by_hooks() -> None:
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        ops.linear(X, WEIGHT.clone().requires_grad_())
    assert {tuple(t.shape) for t in packed} == {(3, 4), (2, 4)}


def test_second_derivatives_are_refused() -> None:
    weight = WEIGHT.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(ops.linear(X, weight).square().sum(), weight, create_graph=True)
    with pytest.raises(DerivativeError, match=r"bert_fast\.linear_bwd: second derivatives are not implemented"):
        gradient.sum().backward()
