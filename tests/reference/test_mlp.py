"""mlp: gradcheck of the explicit backward, the forward against torch, dtypes, what is not wanted, no tokens."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.reference.mlp import mlp_bwd, mlp_fwd
from bert_fast.testing.explicit import explicit_function

ALL = (True,) * 5


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _inputs(tokens: int = 5) -> tuple[torch.Tensor, ...]:
    return _rand(tokens, 4), _rand(7, 4), _rand(7), _rand(3, 7), _rand(3)


@pytest.mark.parametrize("hidden_act", sorted(ACTIVATIONS))
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("save_pre", [True, False])
def test_gradcheck(hidden_act: str, has_bias: bool, save_pre: bool) -> None:
    def forward(x, up_weight, up_bias, down_weight, down_bias):
        y, pre = mlp_fwd(x, up_weight, up_bias, down_weight, down_bias, hidden_act, save_pre)
        assert (pre is not None) == save_pre
        return (y,), tuple(None if t is None else t.detach() for t in (x, pre, up_weight, up_bias, down_weight))

    def backward(saved, dy):
        return mlp_bwd(dy, *saved, hidden_act, True, True, has_bias, True, has_bias)

    x, up_weight, up_bias, down_weight, down_bias = _inputs()
    inputs = (x, up_weight, up_bias if has_bias else None, down_weight, down_bias if has_bias else None)
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_is_torch(approximate: str) -> None:
    x, up_weight, up_bias, down_weight, down_bias = _inputs()
    hidden_act = {"none": "gelu", "tanh": "gelu_new"}[approximate]
    y, pre = mlp_fwd(x, up_weight, up_bias, down_weight, down_bias, hidden_act, True)
    torch.testing.assert_close(pre, F.linear(x, up_weight, up_bias))
    act = F.gelu(F.linear(x, up_weight, up_bias), approximate=approximate)
    torch.testing.assert_close(y, F.linear(act, down_weight, down_bias))


@pytest.mark.parametrize("wants", list(product((True, False), repeat=5)))
@pytest.mark.parametrize("save_pre", [True, False])
def test_what_is_not_wanted_is_not_there_and_changes_nothing(wants: tuple[bool, ...], save_pre: bool) -> None:
    x, up_weight, up_bias, down_weight, down_bias = (t.detach() for t in _inputs())
    y, pre = mlp_fwd(x, up_weight, up_bias, down_weight, down_bias, "gelu", save_pre)
    dy = torch.randn_like(y)
    whole = mlp_bwd(dy, x, pre, up_weight, up_bias, down_weight, "gelu", *ALL)
    needs_x = wants[1] or (not save_pre and any(wants[:4]))
    part = mlp_bwd(dy, x if needs_x else None, pre, up_weight, up_bias, down_weight, "gelu", *wants)
    for one, other, wanted in zip(whole, part, wants, strict=True):
        assert torch.equal(one, other) if wanted else other is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
def test_narrow_dtypes_round_once(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, *parameters = (t.detach() for t in _inputs())
    x, parameters = x.to(dtype), [t.to(weight_dtype or dtype) for t in parameters]
    y, pre = mlp_fwd(x, *parameters, "gelu", True)
    exact, _ = mlp_fwd(x.float(), *(t.float() for t in parameters), "gelu", False)
    assert torch.equal(y, exact.to(dtype)) and pre.dtype == dtype
    dx, *dparameters = mlp_bwd(y, x, pre, *parameters[:3], "gelu", *ALL)
    assert dx.dtype == dtype and {t.dtype for t in dparameters} == {weight_dtype or dtype}


def test_no_tokens() -> None:
    x, *parameters = (t.detach() for t in _inputs(0))
    y, pre = mlp_fwd(x, *parameters, "gelu", True)
    dx, *dparameters = mlp_bwd(y, x, pre, *parameters[:3], "gelu", *ALL)
    assert y.shape == (0, 3) and dx.shape == (0, 4) and not any(t.any() for t in dparameters)
