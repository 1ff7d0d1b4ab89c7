"""linear_gelu and linear_activation: the torch back-end against the reference, what is saved, autocast, messages."""

from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from bert_fast import ops
from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.torch import linear_gelu as aten
from tests.wants import parametrize_wants

from .linear_cases import assert_autocast_agrees, assert_checkpoints, assert_matches, gradients, leaves, randn, saved

HALF = (torch.float16, torch.bfloat16)
PLAIN = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def _op(backend, hidden_act="gelu", save_pre=True):
    return lambda x, weight, bias: ops.linear_activation(
        x, weight, bias, hidden_act=hidden_act, save_pre=save_pre, backend=backend
    )


def _plain(hidden_act="gelu"):
    """PyTorch's own, with wider parameters rounded as the op rounds them."""

    def run(x, weight, bias):
        return PLAIN[hidden_act](F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)))

    return run


def _inputs(tokens, width_in, width_out, dtype=torch.float32, has_bias=True, weight_dtype=None):
    wide = weight_dtype or dtype
    return {
        "x": randn(tokens, width_in, dtype=dtype),
        "weight": randn(width_out, width_in, dtype=wide),
        "bias": randn(width_out, dtype=wide) if has_bias else None,
    }


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 13, 31), (64, 48, 192), (0, 8, 16), (5, 0, 3)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("save_pre", [True, False])
def test_torch_backend_matches_the_reference(dtype, shape, has_bias, save_pre):
    inputs, dy = _inputs(*shape, dtype, has_bias), randn(shape[0], shape[2], dtype=dtype)
    assert_matches("linear_gelu", _op("torch", save_pre=save_pre), _plain(), _op("reference"), inputs, dy)


@pytest.mark.parametrize("hidden_act", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_activation(hidden_act, dtype):
    inputs, dy = _inputs(9, 12, 20, dtype), randn(9, 20, dtype=dtype)
    assert_matches(
        "linear_gelu", _op("torch", hidden_act), _plain(hidden_act), _op("reference", hidden_act), inputs, dy
    )


@pytest.mark.parametrize("save_pre", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_fp32_parameters_beside_half_precision(dtype, save_pre):
    inputs, dy = _inputs(33, 24, 40, dtype, weight_dtype=torch.float32), randn(33, 40, dtype=dtype)
    assert_matches("linear_gelu", _op("torch", save_pre=save_pre), _plain(), _op("reference"), inputs, dy)
    actual = gradients(_op("torch", save_pre=save_pre), inputs, dy)
    assert actual["y"].dtype == actual["dx"].dtype == dtype
    assert actual["dweight"].dtype == actual["dbias"].dtype == torch.float32


def test_erf_and_tanh_are_different_functions():
    inputs = _inputs(16, 8, 8, torch.float64).values()
    erf, tanh = (ops.linear_gelu(*inputs, approximate=approximate) for approximate in ("none", "tanh"))
    assert 1e-5 < (erf - tanh).abs().max() < 1e-2


@pytest.mark.parametrize("save_pre", [True, False])
@parametrize_wants("x", "weight", "bias")
def test_only_wanted_gradients_are_computed(wants, save_pre):
    inputs, dy = _inputs(6, 8, 5), torch.randn(6, 5)
    expected = gradients(_op("torch"), inputs, dy)
    given = [t.clone().requires_grad_(name in wants) for name, t in inputs.items()]
    with mock.patch.object(aten, "linear_gelu_bwd", wraps=aten.linear_gelu_bwd) as backward:
        y = _op("torch", save_pre=save_pre)(*given)
        if not wants:
            assert not y.requires_grad
            return
        y.backward(dy)
    a, _, _, asked = backward.call_args.args
    assert asked == wants
    assert (a.x is None) == (save_pre and "weight" not in wants)
    for name, t in zip(inputs, given, strict=True):
        assert torch.equal(t.grad, expected[f"d{name}"]) if name in wants else t.grad is None


def test_what_is_saved():
    x, weight, bias = given = leaves(_inputs(6, 8, 5))
    shapes = sorted(tuple(t.shape) for t in saved(lambda: _op("torch")(*given)))
    assert shapes == [(5, 8), (6, 5), (6, 8)]  # weight, pre, x
    shapes = sorted(tuple(t.shape) for t in saved(lambda: _op("torch", save_pre=False)(*given)))
    assert shapes == [(5,), (5, 8), (6, 8)]
    frozen = x, weight.detach(), bias
    assert sorted(tuple(t.shape) for t in saved(lambda: _op("torch")(*frozen))) == [(5, 8), (6, 5)]
    with torch.no_grad(), mock.patch.object(aten, "linear_gelu_fwd", wraps=aten.linear_gelu_fwd) as forward:
        assert not saved(lambda: _op("torch")(*given))
    assert forward.call_args.args[0].save_pre is False


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("save_pre", [True, False])
def test_autocast(compiles, save_pre):
    assert_autocast_agrees("linear_gelu", _op("torch", save_pre=save_pre), _plain(), _inputs(33, 24, 40), compiles)


@pytest.mark.parametrize("save_pre", [True, False])
def test_checkpointing(save_pre):
    assert_checkpoints(_op("torch", save_pre=save_pre), _inputs(6, 8, 5), torch.randn(6, 5))


def test_second_derivatives_are_refused_by_name():
    given = leaves(_inputs(3, 4, 5))
    (dx,) = torch.autograd.grad(ops.linear_gelu(*given).sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="linear_gelu_bwd: second derivatives are not implemented"):
        dx.sum().backward()


def test_gradcheck_and_opcheck():
    given = leaves(_inputs(3, 4, 5, torch.float64))
    assert torch.autograd.gradcheck(ops.linear_gelu, given)
    torch.library.opcheck(torch.ops.bert_fast.linear_gelu_fwd, (*given, "gelu", True, "auto"))


X, W, B = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(5)
BAD = {
    "rank": ((X[None], W), {}, ValueError, r"x: expected shape \[T, K\], got \[1, 2, 4\]"),
    "width": ((X, W[:, :3]), {}, ValueError, r"weight: expected shape \[N, 4\], got \[5, 3\]"),
    "bias": ((X, W, B[:4]), {}, ValueError, r"bias: expected shape \[5\], got \[4\]"),
    "bias dtype": ((X, W, B.half()), {}, TypeError, r"bias: expected dtype float32 \(that of weight\), got float16"),
    "device": ((X, W.to("meta")), {}, ValueError, r"weight: expected device cpu \(that of x\), got meta"),
    "name": ((X, W), {"hidden_act": "geglu"}, ValueError, r"hidden_act: expected one of \['gelu', .*, got 'geglu'"),
    "callable": ((X, W), {"hidden_act": F.gelu}, TypeError, "hidden_act: expected a string, got builtin_function"),
    "flag": ((X, W), {"save_pre": 1}, TypeError, "save_pre: expected a bool, got int"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    arguments, keywords, error, message = BAD[case]
    with pytest.raises(error, match=message):
        ops.linear_activation(*arguments, **keywords)


def test_unknown_approximation_is_named():
    with pytest.raises(ValueError, match="approximate: expected one of none, tanh, got 'erf'"):
        ops.linear_gelu(X, W, approximate="erf")
