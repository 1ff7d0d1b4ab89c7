"""The module DropoutAddLayerNorm: its parameters, its dropout, its agreement with the modules that it replaces."""

from typing import Any

import pytest
import torch

from bert_fast.modules.dropout_add_layer_norm import DropoutAddLayerNorm
from bert_fast.testing.compare import assert_close_to_truth


def test_state_dict_is_that_of_layer_norm() -> None:
    module, plain = DropoutAddLayerNorm(16), torch.nn.LayerNorm(16)
    torch.nn.init.normal_(plain.weight)
    module.load_state_dict(plain.state_dict())
    assert torch.equal(module.weight, plain.weight)
    plain.load_state_dict(module.state_dict())


def test_eval_is_layer_norm_of_the_sum() -> None:
    module = DropoutAddLayerNorm(16, eps=1e-5, dropout_p=0.5).eval()
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    x, residual = torch.randn(2, 7, 16).unbind()

    def plain(dtype: torch.dtype) -> torch.Tensor:
        h = x.to(dtype) + residual.to(dtype)
        return torch.nn.functional.layer_norm(h, (16,), module.weight.to(dtype), module.bias.to(dtype), 1e-5)

    assert_close_to_truth(
        "dropout_add_layer_norm", "y", module(x, residual), plain(torch.float32), plain(torch.float64)
    )


def test_training_draws_its_mask_from_torchs_generator() -> None:
    module = DropoutAddLayerNorm(64, dropout_p=0.5)
    x, residual = torch.randn(2, 7, 64).unbind()
    torch.manual_seed(1)
    first, second = module(x, residual), module(x, residual)
    torch.manual_seed(1)
    assert torch.equal(first, module(x, residual))
    assert not torch.equal(first, second)


def test_given_seed_and_coords_name_the_mask() -> None:
    module = DropoutAddLayerNorm(64, dropout_p=0.5)
    x, residual = torch.randn(2, 7, 64).unbind()
    positions = torch.arange(7, dtype=torch.int32)
    names = {"seed": torch.tensor([3]), "coords": torch.stack([positions * 0, positions], dim=1), "site": 2}
    whole = module(x, residual, **names)
    assert torch.equal(whole, module(x, residual, **names))
    part = {**names, "coords": names["coords"][3:]}  # the same tokens, packed differently, keep their masks
    assert torch.equal(whole[3:], module(x[3:], residual[3:], **part))
    assert not torch.equal(whole, module(x, residual, **{**names, "site": 3}))


def test_repr_says_what_it_is() -> None:
    assert repr(DropoutAddLayerNorm(8, 1e-5, 0.1)) == "DropoutAddLayerNorm(8, eps=1e-05, dropout_p=0.1)"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        pytest.param({"hidden_size": 0}, ValueError, "hidden_size: expected at least 1, got 0", id="no-columns"),
        pytest.param({"hidden_size": -2}, ValueError, "hidden_size: expected at least 1, got -2", id="negative"),
        pytest.param({"hidden_size": (8,)}, TypeError, "hidden_size: expected an int, got tuple", id="shape"),
        pytest.param({"hidden_size": 8, "dropout_p": 2.0}, ValueError, "dropout_p: expected a prob", id="probability"),
        pytest.param({"hidden_size": 8, "dropout_p": "a"}, TypeError, "dropout_p: expected a number", id="text"),
    ],
)
def test_the_constructor_refuses_what_no_call_could_use(arguments: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        DropoutAddLayerNorm(**arguments)


def test_x_is_named_where_a_seed_would_be_drawn_for_it() -> None:
    with pytest.raises(TypeError, match=r"^x: expected a Tensor, got list"):
        DropoutAddLayerNorm(2, dropout_p=0.5)([1.0, 2.0], torch.zeros(1, 2))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (1, 2, 4)])
def test_rows_are_named_where_coords_are_made_of_them(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^x: expected shape \[T, 4\]"):
        DropoutAddLayerNorm(4, dropout_p=0.5)(torch.zeros(shape), torch.zeros(2, 4))
