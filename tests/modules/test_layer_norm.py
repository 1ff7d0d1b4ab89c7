"""The module LayerNorm: its parameters, and its agreement with `nn.LayerNorm`."""

from typing import Any

import pytest
import torch

from bert_fast.modules.layer_norm import LayerNorm
from bert_fast.testing.compare import assert_close_to_truth


def test_state_dict_is_that_of_layer_norm() -> None:
    module, plain = LayerNorm(16), torch.nn.LayerNorm(16)
    torch.nn.init.normal_(plain.weight)
    torch.nn.init.normal_(plain.bias)
    module.load_state_dict(plain.state_dict())
    assert torch.equal(module.weight, plain.weight) and torch.equal(module.bias, plain.bias)
    plain.load_state_dict(module.state_dict())


def test_equals_torch_and_trains() -> None:
    module, plain = LayerNorm(16, eps=1e-5), torch.nn.LayerNorm(16, eps=1e-5)
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    plain.load_state_dict(module.state_dict())
    double = torch.nn.LayerNorm(16, eps=1e-5, dtype=torch.float64)
    double.load_state_dict(module.state_dict())
    x, dy = torch.randn(2, 3, 5, 16).unbind()
    results = []
    for one in (module, plain, double):
        leaf = x.to(one.weight.dtype, copy=True).requires_grad_()
        y = one(leaf)
        y.backward(dy.to(y.dtype))
        results.append((y, leaf.grad, one.weight.grad, one.bias.grad))
    for name, *outputs in zip(("y", "dx", "dweight", "dbias"), *results, strict=True):
        assert_close_to_truth("layer_norm", name, *outputs)


def test_default_eps_is_that_of_bert() -> None:
    assert LayerNorm(8).eps == 1e-12
    assert LayerNorm(8, 1e-5).eps == 1e-5


def test_tools_see_a_layer_norm() -> None:
    """Those that keep weight decay off LayerNorm, or wrap modules by type, ask for the class."""
    assert isinstance(LayerNorm(8), torch.nn.LayerNorm)
    assert "(8,), eps=1e-12" in repr(LayerNorm(8))


@pytest.mark.parametrize(("hidden_size", "error"), [(0, ValueError), (-1, ValueError), ("8", TypeError)])
def test_the_constructor_refuses_what_is_no_size(hidden_size: Any, error: type) -> None:
    with pytest.raises(error, match=r"^hidden_size: expected"):
        LayerNorm(hidden_size)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"expected a last dimension of 4 \(hidden_size\), got shape \[3\]"),
        (torch.zeros(()), ValueError, r"expected a last dimension of 4 \(hidden_size\), got shape \[\]"),
        (torch.zeros(2, 4, device="meta"), ValueError, "expected device cpu"),
        ([1.0], TypeError, "expected a Tensor, got list"),
    ],
    ids=["width", "scalar", "device", "list"],
)
def test_the_input_is_named(x: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=f"^input: {message}"):
        LayerNorm(4)(x)
