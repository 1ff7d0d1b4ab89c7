"""mlp: gradcheck of the explicit backward, the forward against torch, dtypes, what is not wanted, no tokens."""

import pytest
import torch
import torch.nn.functional as F

from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.reference.mlp import Mlp, mlp_bwd, mlp_fwd
from bert_fast.testing.explicit import explicit_function
from tests.wants import parametrize_wants

GRADIENTS = ("x", "up_weight", "up_bias", "down_weight", "down_bias")


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _inputs(tokens: int = 5) -> tuple[torch.Tensor, ...]:
    return _rand(tokens, 4), _rand(7, 4), _rand(7), _rand(3, 7), _rand(3)


@pytest.mark.parametrize("hidden_act", sorted(ACTIVATIONS))
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("save_pre", [True, False])
def test_gradcheck(hidden_act: str, has_bias: bool, save_pre: bool) -> None:
    def forward(*tensors):
        y, pre = mlp_fwd(Mlp(*tensors, hidden_act, save_pre))
        assert (pre is not None) == save_pre
        return (y,), [None if t is None else t.detach() for t in (*tensors[:4], pre)]

    def backward(saved, dy):
        *tensors, pre = saved
        made = mlp_bwd(Mlp(*tensors, None, hidden_act, save_pre), dy, pre, wants)
        return [made.get(name) for name in GRADIENTS]

    wants = {name for name in GRADIENTS if has_bias or not name.endswith("bias")}
    inputs = [t if name in wants else None for name, t in zip(GRADIENTS, _inputs(), strict=True)]
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_is_torch(approximate: str) -> None:
    x, up_weight, up_bias, down_weight, down_bias = _inputs()
    hidden_act = {"none": "gelu", "tanh": "gelu_new"}[approximate]
    y, pre = mlp_fwd(Mlp(x, up_weight, up_bias, down_weight, down_bias, hidden_act, True))
    torch.testing.assert_close(pre, F.linear(x, up_weight, up_bias))
    act = F.gelu(F.linear(x, up_weight, up_bias), approximate=approximate)
    torch.testing.assert_close(y, F.linear(act, down_weight, down_bias))


@parametrize_wants(*GRADIENTS)
@pytest.mark.parametrize("save_pre", [True, False])
def test_what_is_not_wanted_is_not_there_and_changes_nothing(wants: frozenset[str], save_pre: bool) -> None:
    a = Mlp(*(t.detach() for t in _inputs()), "gelu", save_pre)
    y, pre = mlp_fwd(a)
    a, dy = a._replace(down_bias=None), torch.randn_like(y)
    whole = mlp_bwd(a, dy, pre, {*GRADIENTS})
    needs_x = "up_weight" in wants or (not save_pre and wants - {"down_bias"})
    part = mlp_bwd(a if needs_x else a._replace(x=None), dy, pre, wants)
    assert part.keys() == wants
    assert all(torch.equal(part[name], whole[name]) for name in wants)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
def test_narrow_dtypes_round_once(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, *parameters = (t.detach() for t in _inputs())
    tensors = [x.to(dtype), *(t.to(weight_dtype or dtype) for t in parameters)]
    a = Mlp(*tensors, "gelu", True)
    y, pre = mlp_fwd(a)
    exact, _ = mlp_fwd(Mlp(*(t.float() for t in tensors), "gelu", False))
    assert torch.equal(y, exact.to(dtype)) and pre.dtype == dtype
    made = mlp_bwd(a._replace(down_bias=None), y, pre, {*GRADIENTS})
    expected = {"x": dtype} | dict.fromkeys(GRADIENTS[1:], weight_dtype or dtype)
    assert {name: t.dtype for name, t in made.items()} == expected


def test_no_tokens() -> None:
    a = Mlp(*(t.detach() for t in _inputs(0)), "gelu", True)
    y, pre = mlp_fwd(a)
    made = mlp_bwd(a._replace(down_bias=None), y, pre, {*GRADIENTS})
    assert made.keys() == {*GRADIENTS}
    assert y.shape == (0, 3) and made.pop("x").shape == (0, 4) and not any(t.any() for t in made.values())
