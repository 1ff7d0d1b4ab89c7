"""gated_mlp: gradcheck of the explicit backward, the forward against torch, dropout, dtypes, what is not wanted."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.gated_mlp import GatedMlp, gated_mlp_bwd, gated_mlp_fwd
from bert_fast.testing.explicit import explicit_function
from tests.wants import parametrize_wants

GRADIENTS = ("x", "weight", "bias", "down_weight", "down_bias")
SEED = torch.tensor([11])


def _rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _inputs(tokens: int = 5) -> tuple[Tensor, ...]:
    return _rand(tokens, 4), _rand(7, 4), _rand(7), _rand(7, 4), _rand(7), _rand(3, 7), _rand(3)


def _record(*tensors: Tensor | None, hidden_act: str = "silu", dropout_p: float = 0.0, save_pre: bool = True):  # type: ignore[no-untyped-def]
    tokens = torch.arange(len(tensors[0]), dtype=torch.int32)
    coords = torch.stack((tokens // 2, tokens % 2), 1)
    return GatedMlp(*tensors, hidden_act, dropout_p, SEED, coords, 3, save_pre)


@pytest.mark.parametrize("hidden_act", sorted(ACTIVATIONS))
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("save_pre", "dropout_p"), [(True, 0.0), (False, 0.3), (True, 0.3)])
def test_gradcheck(hidden_act: str, has_bias: bool, save_pre: bool, dropout_p: float) -> None:
    options = dict(hidden_act=hidden_act, dropout_p=dropout_p, save_pre=save_pre)

    def forward(*tensors):
        y, pre = gated_mlp_fwd(_record(*tensors, **options))
        assert (pre is not None) == save_pre
        return (y,), [None if t is None else t.detach() for t in (*tensors[:6], pre)]

    def backward(saved, dy):
        *tensors, pre = saved
        made = gated_mlp_bwd(_record(*tensors, None, **options), dy, pre, wants)
        halves = [None if t is None else t.tensor_split(2) for t in (made["weight"], made.get("bias"))]
        (gate, up), (gate_bias, up_bias) = (half or (None, None) for half in halves)
        return [made["x"], gate, gate_bias, up, up_bias, made["down_weight"], made.get("down_bias")]

    wants = {name for name in GRADIENTS if has_bias or not name.endswith("bias")}
    inputs = [t if has_bias or t.dim() > 1 else None for t in _inputs()]
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_is_torch(dropout_p: float) -> None:
    x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias = inputs = _inputs()
    a = _record(*inputs, hidden_act="gelu", dropout_p=dropout_p)
    y, pre = gated_mlp_fwd(a)
    gate, up = F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias)
    torch.testing.assert_close(pre, torch.cat([gate, up], 1))
    h = F.gelu(gate) * up * keep_mask(SEED, 3, a.coords, 7, dropout_p) * dropout_scale(dropout_p)
    torch.testing.assert_close(y, F.linear(h, down_weight, down_bias))


@parametrize_wants(*GRADIENTS)
@pytest.mark.parametrize("save_pre", [True, False])
def test_what_is_not_wanted_is_not_there_and_changes_nothing(wants: frozenset[str], save_pre: bool) -> None:
    a = _record(*(t.detach() for t in _inputs()), dropout_p=0.3, save_pre=save_pre)
    y, pre = gated_mlp_fwd(a)
    a, dy = a._replace(down_bias=None), torch.randn_like(y)
    whole = gated_mlp_bwd(a, dy, pre, {*GRADIENTS})
    needs_x = "weight" in wants or (not save_pre and wants - {"down_bias"})
    part = gated_mlp_bwd(a if needs_x else a._replace(x=None), dy, pre, wants)
    assert part.keys() == wants
    assert all(torch.equal(part[name], whole[name]) for name in wants)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
def test_narrow_dtypes_round_once(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, *parameters = (t.detach() for t in _inputs())
    tensors = [x.to(dtype), *(t.to(weight_dtype or dtype) for t in parameters)]
    a = _record(*tensors)
    y, pre = gated_mlp_fwd(a)
    exact, _ = gated_mlp_fwd(_record(*(t.float() for t in tensors)))
    assert torch.equal(y, exact.to(dtype)) and pre.dtype == dtype
    made = gated_mlp_bwd(a._replace(down_bias=None), y, pre, {*GRADIENTS})
    expected = {"x": dtype} | dict.fromkeys(GRADIENTS[1:], weight_dtype or dtype)
    assert {name: t.dtype for name, t in made.items()} == expected


def test_no_tokens() -> None:
    a = _record(*(t.detach() for t in _inputs(0)), dropout_p=0.3)
    y, pre = gated_mlp_fwd(a)
    made = gated_mlp_bwd(a._replace(down_bias=None), y, pre, {*GRADIENTS})
    assert made.keys() == {*GRADIENTS}
    assert y.shape == (0, 3) and made.pop("x").shape == (0, 4) and not any(t.any() for t in made.values())
