"""Derivatives in forward mode: ops say that they have none, and drop no tangent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from bert_fast import ops
from bert_fast.errors import DerivativeError

from .test_every_op import SAMPLES

NAMES = [name for name in SAMPLES if not name.startswith("optimizer")]
REFUSED = r"^\w+: expected no tangent, got one: derivatives of bert_fast\.\w+ in forward mode"
X, WEIGHT, TANGENT = torch.randn(3, 4), torch.randn(2, 4), torch.randn(3, 4)


def _differentiable(arguments: tuple[Any, ...]) -> list[int]:
    return [index for index, value in enumerate(arguments) if isinstance(value, Tensor) and value.requires_grad]


@pytest.mark.parametrize("records", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("name", NAMES)
def test_dual_numbers(name: str, records: bool) -> None:
    """In the place of each argument that has a gradient, with backward recorded beside it and without."""
    sample = SAMPLES[name]
    arguments = sample.make(5)
    plain = [value.detach() if isinstance(value, Tensor) and not records else value for value in arguments]
    with forward_ad.dual_level():
        expected = sample.function(*plain)
        assert forward_ad.unpack_dual(expected).tangent is None, "nothing to refuse"
        for index in _differentiable(arguments):
            duals = list(plain)
            duals[index] = forward_ad.make_dual(plain[index], torch.ones_like(plain[index]))
            with pytest.raises(DerivativeError, match=REFUSED):
                sample.function(*duals)


@pytest.mark.parametrize("name", NAMES)
def test_jvp(name: str) -> None:
    sample = SAMPLES[name]
    arguments = [value.detach() if isinstance(value, Tensor) else value for value in sample.make(5)]
    for index in _differentiable(sample.make(5)):

        def function(value: Tensor, index: int = index) -> Any:
            return sample.function(*arguments[:index], value, *arguments[index + 1 :])

        with pytest.raises(DerivativeError, match=REFUSED):
            torch.func.jvp(function, (arguments[index],), (torch.ones_like(arguments[index]),))


def _linear(x: Tensor) -> Tensor:
    return ops.linear(x, WEIGHT)


WAYS: dict[str, Callable[[], Any]] = {
    "jacfwd": lambda: torch.func.jacfwd(_linear)(X),
    "linearize": lambda: torch.func.linearize(_linear, X),
    "vmap within jvp": lambda: torch.func.jvp(torch.func.vmap(_linear), (X[None],), (TANGENT[None],)),
    "jvp within jvp": lambda: torch.func.jvp(lambda t: torch.func.jvp(_linear, (X,), (t,))[1], (X,), (TANGENT,)),
    "jvp of what an outer jvp follows": lambda: torch.func.jvp(
        lambda x: torch.func.jvp(lambda y: y * _linear(x).sum(), (X,), (TANGENT,))[0], (X,), (TANGENT,)
    ),
    "jacobian": lambda: torch.autograd.functional.jacobian(_linear, X, strategy="forward-mode", vectorize=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_asking(way: str) -> None:
    with pytest.raises(DerivativeError, match=REFUSED):
        WAYS[way]()


def test_beside_other_derivatives() -> None:
    """An op of constants within a jvp is a constant, where it was computed within too."""
    value, tangent = torch.func.jvp(lambda t: t * _linear(t.new_ones(3, 4) + X).sum(), (TANGENT,), (X,))
    torch.testing.assert_close(tangent, X * _linear(1 + X).sum())
    torch.testing.assert_close(value, TANGENT * _linear(1 + X).sum())
