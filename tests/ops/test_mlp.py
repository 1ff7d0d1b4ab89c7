"""mlp: the torch back-end against the reference, chunks of tokens, what is made and saved, autocast, messages."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import ops
from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.reference.mlp import Mlp
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.torch import _chunks
from bert_fast.torch import mlp as aten
from tests.wants import parametrize_wants

from .linear_cases import assert_autocast_agrees, assert_checkpoints, assert_matches, gradients, leaves, randn, saved
from .test_linear_gelu import PLAIN

HALF = (torch.float16, torch.bfloat16)
GRADIENTS = ("x", "up_weight", "up_bias", "down_weight", "down_bias")


def _op(backend, hidden_act="gelu", save_pre=True):
    return lambda *tensors: ops.mlp(*tensors, hidden_act=hidden_act, save_pre=save_pre, backend=backend)


def _plain(hidden_act="gelu"):
    """PyTorch's own, with wider parameters rounded as the op rounds them."""

    def run(x, *parameters):
        up_weight, up_bias, down_weight, down_bias = (None if p is None else p.to(x.dtype) for p in parameters)
        return F.linear(PLAIN[hidden_act](F.linear(x, up_weight, up_bias)), down_weight, down_bias)

    return run


def _inputs(tokens, hidden, intermediate, dtype=torch.float32, has_bias=True, weight_dtype=None, width_out=None):
    wide, width_out = weight_dtype or dtype, hidden if width_out is None else width_out
    return {
        "x": randn(tokens, hidden, dtype=dtype),
        "up_weight": randn(intermediate, hidden, dtype=wide, scale=max(1, hidden) ** -0.5),
        "up_bias": randn(intermediate, dtype=wide) if has_bias else None,
        "down_weight": randn(width_out, intermediate, dtype=wide, scale=max(1, intermediate) ** -0.5),
        "down_bias": randn(width_out, dtype=wide) if has_bias else None,
    }


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(_chunks, "chunk_tokens", lambda *_: 8)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 13, 31), (64, 48, 192), (0, 8, 16), (5, 3, 0)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("save_pre", [True, False])
def test_torch_backend_matches_the_reference(dtype, shape, has_bias, save_pre):
    inputs, dy = _inputs(*shape, dtype, has_bias), randn(*shape[:2], dtype=dtype)
    assert_matches("mlp", _op("torch", save_pre=save_pre), _plain(), _op("reference"), inputs, dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 16, 17, 61])
@pytest.mark.parametrize("save_pre", [True, False])
def test_chunks_of_tokens(small_chunks, tokens, dtype, save_pre):
    inputs, dy = _inputs(tokens, 12, 20, dtype, width_out=10), randn(tokens, 10, dtype=dtype)
    assert_matches("mlp", _op("torch", save_pre=save_pre), _plain(), _op("reference"), inputs, dy)


@pytest.mark.parametrize("hidden_act", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_activation(small_chunks, hidden_act, dtype):
    inputs, dy = _inputs(9, 12, 20, dtype), randn(9, 12, dtype=dtype)
    assert_matches("mlp", _op("torch", hidden_act), _plain(hidden_act), _op("reference", hidden_act), inputs, dy)


@pytest.mark.parametrize("save_pre", [True, False])
@pytest.mark.parametrize("tokens", [6, 33])
@pytest.mark.parametrize("dtype", HALF)
def test_fp32_parameters_beside_half_precision(small_chunks, dtype, tokens, save_pre):
    inputs, dy = _inputs(tokens, 24, 40, dtype, weight_dtype=torch.float32), randn(tokens, 24, dtype=dtype)
    assert_matches("mlp", _op("torch", save_pre=save_pre), _plain(), _op("reference"), inputs, dy)
    actual = gradients(_op("torch", save_pre=save_pre), inputs, dy)
    assert actual.pop("y").dtype == actual.pop("dx").dtype == dtype
    assert {t.dtype for t in actual.values()} == {torch.float32}


def test_one_dtype_for_each_half():
    x, up_weight, up_bias, down_weight, down_bias = leaves(_inputs(6, 8, 10, torch.bfloat16))
    y = ops.mlp(x, up_weight, up_bias, down_weight.detach().float().requires_grad_(), down_bias.detach().float())
    y.sum().backward()
    assert y.dtype == up_weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("save_pre", [True, False])
@parametrize_wants(*GRADIENTS)
def test_only_wanted_gradients_are_computed(small_chunks, wants, save_pre):
    inputs, dy = _inputs(11, 6, 10), torch.randn(11, 6)
    truth, plain = gradients(_plain(), inputs, dy, torch.float64), gradients(_plain(), inputs, dy)
    given = [t.clone().requires_grad_(name in wants) for name, t in inputs.items()]
    with mock.patch.object(aten, "mlp_bwd", wraps=aten.mlp_bwd) as backward:
        y = _op("torch", save_pre=save_pre)(*given)
        if not wants:
            assert not y.requires_grad
            return
        y.backward(dy)
    a, _, pre, asked = backward.call_args.args
    assert asked == wants
    needs_pre = bool(wants - {"down_bias"})
    assert (pre is None) == (not (save_pre and needs_pre))
    assert (a.x is None) == (not ("up_weight" in wants or (needs_pre and not save_pre)))
    for name, t in zip(inputs, given, strict=True):
        if name in wants:
            assert_close_to_truth("mlp", f"d{name}", t.grad, plain[f"d{name}"], truth[f"d{name}"])
        else:
            assert t.grad is None


def test_chunks_take_at_most_their_bytes():
    for width in (0, 1, 37, 1536, 3072, 4096, 10**9):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            tokens = _chunks.chunk_tokens(width, dtype)
            assert tokens >= 1 and tokens & (tokens - 1) == 0
            assert tokens == 1 or tokens * width * dtype.itemsize <= _chunks.CHUNK_BYTES
    assert [_chunks.chunk_tokens(width, torch.float32) for width in (1536, 3072, 4096)] == [1024, 512, 512]


class Sizes(TorchDispatchMode):
    """Numbers of elements of all that PyTorch's operators made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.made.append(result.numel())
        return result


def test_nothing_wide_is_made_but_the_pre_activation(small_chunks):
    """Of T * I elements, that is; 40 tokens in chunks of 8, and a width at which nothing else has as many."""
    tensors, wide = list(_inputs(40, 6, 64, has_bias=False).values())[:4], 40 * 64
    x, up_weight, _, down_weight = tensors
    with Sizes() as whole:
        F.linear(F.gelu(F.linear(x, up_weight)), down_weight)
    assert sum(size >= wide for size in whole.made) == 2
    a = Mlp(x, up_weight, None, down_weight, None, "gelu", False)
    with Sizes() as inference:
        aten.mlp_fwd(a)
    assert max(inference.made) == 8 * 64
    with Sizes() as forward:
        _, pre = aten.mlp_fwd(a._replace(save_pre=True))
    assert [size for size in forward.made if size > 8 * 64] == [pre.numel()]
    for kept in (pre, None):
        with Sizes() as backward:
            aten.mlp_bwd(a, torch.randn(40, 6), kept, {*GRADIENTS})
        assert max(backward.made) == 8 * 64


def test_what_is_saved():
    given = leaves(_inputs(6, 8, 10, width_out=7))

    def shapes(function, *tensors):
        return sorted(tuple(t.shape) for t in saved(lambda: function(*tensors)))

    assert shapes(_op("torch"), *given) == [(6, 8), (6, 10), (7, 10), (10, 8)]  # x, pre, both weights: no activation
    assert shapes(_op("torch", save_pre=False), *given) == [(6, 8), (7, 10), (10,), (10, 8)]
    x, up_weight, up_bias, down_weight, down_bias = given
    assert shapes(_op("torch"), x, up_weight.detach(), up_bias, down_weight, down_bias) == [(6, 10), (7, 10), (10, 8)]
    frozen = x.detach(), up_weight.detach(), None, down_weight.detach(), down_bias
    assert shapes(_op("torch"), *frozen) == [(7, 10), (10, 8)]
    with torch.no_grad():
        assert not saved(lambda: _op("torch")(*given))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("save_pre", [True, False])
def test_autocast(compiles, save_pre):
    assert_autocast_agrees("mlp", _op("torch", save_pre=save_pre), _plain(), _inputs(33, 24, 40), compiles)


@pytest.mark.parametrize("save_pre", [True, False])
def test_checkpointing(small_chunks, save_pre):
    assert_checkpoints(_op("torch", save_pre=save_pre), _inputs(20, 8, 5), torch.randn(20, 8))


def test_runs_repeat_bit_for_bit(small_chunks):
    inputs, dy = _inputs(50, 24, 40), torch.randn(50, 24)
    first, second = (gradients(_op("torch"), inputs, dy) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("relaid", [lambda t: t.t().contiguous().t(), lambda t: t.repeat_interleave(2, 1)[:, ::2]])
def test_strides(small_chunks, relaid):
    def strided(*tensors):
        return _op("torch")(*(relaid(t) if t.dim() == 2 else t for t in tensors))

    assert_matches("mlp", strided, _plain(), _op("reference"), _inputs(19, 12, 20), relaid(torch.randn(19, 12)))


def test_a_bad_number_spoils_its_token(small_chunks):
    inputs = _inputs(20, 12, 20)
    inputs["x"][13, 5] = float("nan")
    actual = gradients(_op("torch"), inputs, torch.randn(20, 12))
    spoilt = (torch.arange(20)[:, None] == 13).expand(20, 12)
    assert torch.equal(actual["y"].isnan(), spoilt) and torch.equal(actual["dx"].isnan(), spoilt)
    assert actual["dup_weight"].isnan().all() and actual["ddown_bias"].isfinite().all()


def test_second_derivatives_are_refused_by_name():
    given = leaves(_inputs(3, 4, 5))
    (dx,) = torch.autograd.grad(ops.mlp(*given).sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="mlp_bwd: second derivatives are not implemented"):
        dx.sum().backward()


@pytest.mark.parametrize("save_pre", [True, False])
def test_gradcheck_and_opcheck(small_chunks, save_pre):
    given = leaves(_inputs(9, 4, 5, torch.float64))
    assert torch.autograd.gradcheck(_op("torch", save_pre=save_pre), given)
    torch.library.opcheck(torch.ops.bert_fast.mlp_fwd, (*given, "gelu", save_pre, "auto"))


X, U, BU, D, BD = (torch.zeros(shape) for shape in ((2, 4), (6, 4), (6,), (4, 6), (4,)))
BAD = {
    "rank": ((X[0], U, BU, D), {}, ValueError, r"x: expected shape \[T, K\], got \[4\]"),
    "up": ((X, U.t(), BU, D), {}, ValueError, r"up_weight: expected shape \[I, 4\], got \[4, 6\]"),
    "up bias": ((X, U, BD, D), {}, ValueError, r"up_bias: expected shape \[6\], got \[4\]"),
    "down": ((X, U, BU, D.t()), {}, ValueError, r"down_weight: expected shape \[N, 6\], got \[6, 4\]"),
    "down bias": ((X, U, BU, D, BU), {}, ValueError, r"down_bias: expected shape \[4\], got \[6\]"),
    "dtype": (
        (X.half(), U, BU, D.bfloat16()),
        {},
        TypeError,
        r"down_weight: expected dtype float16 .* or float32, got",
    ),
    "bias dtype": (
        (X.half(), U, BU.half(), D),
        {},
        TypeError,
        r"up_bias: expected dtype float32 \(that of up_weight\)",
    ),
    "no tensor": ((X, U, 0.0, D), {}, TypeError, "up_bias: expected a Tensor, got float"),
    "device": ((X, U, BU, D.to("meta")), {}, ValueError, r"down_weight: expected device cpu \(that of x\), got meta"),
    "name": ((X, U, BU, D), {"hidden_act": "mish"}, ValueError, r"hidden_act: expected one of .*, got 'mish'"),
    "callable": (
        (X, U, BU, D),
        {"hidden_act": F.gelu},
        TypeError,
        "hidden_act: expected a string, got builtin_function",
    ),
    "flag": ((X, U, BU, D), {"save_pre": None}, TypeError, "save_pre: expected a bool, got NoneType"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    arguments, keywords, error, message = BAD[case]
    with pytest.raises(error, match=message):
        ops.mlp(*arguments, **keywords)


def test_meta_tensors_have_shapes():
    x, *parameters = (t.to("meta").requires_grad_() for t in _inputs(6, 8, 10, width_out=7).values())
    y = ops.mlp(x, *parameters)
    y.sum().backward()
    assert y.shape == (6, 7) and [p.grad.shape for p in parameters] == [p.shape for p in parameters]
