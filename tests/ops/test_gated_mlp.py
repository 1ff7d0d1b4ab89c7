"""gated_mlp: the torch back-end against the reference, chunks, masks, what is made and saved, autocast, messages."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_fast import ops
from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.gated_mlp import GatedMlp
from bert_fast.storage import join_memory
from bert_fast.torch import _chunks
from bert_fast.torch import gated_mlp as aten
from tests.wants import parametrize_wants

from .linear_cases import assert_autocast_agrees, assert_checkpoints, assert_matches, gradients, leaves, randn, saved
from .test_linear_gelu import PLAIN
from .test_mlp import Sizes

HALF = (torch.float16, torch.bfloat16)
GRADIENTS = ("x", "gate_weight", "gate_bias", "up_weight", "up_bias", "down_weight", "down_bias")
SEED, SITE = torch.tensor([-7]), 7


def _coords(tokens):
    index = torch.arange(tokens, dtype=torch.int32)
    return torch.stack((index // 4, index % 4), 1)


def _op(backend, hidden_act="silu", save_pre=True, dropout_p=0.0):
    def run(x, *parameters):
        drops = dict(dropout_p=dropout_p, seed=SEED, coords=_coords(len(x)), site=SITE)
        return ops.gated_mlp(x, *parameters, hidden_act=hidden_act, save_pre=save_pre, **drops, backend=backend)

    return run


def _plain(hidden_act="silu", dropout_p=0.0):
    """PyTorch's own, with wider parameters rounded as the op rounds them, and the reference's mask."""

    def run(x, *parameters):
        gate, gate_bias, up, up_bias, down, down_bias = (None if p is None else p.to(x.dtype) for p in parameters)
        h = PLAIN[hidden_act](F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)
        keep = keep_mask(SEED, SITE, _coords(len(x)), h.shape[1], dropout_p)
        return F.linear(h * keep * dropout_scale(dropout_p), down, down_bias)

    return run


def _inputs(tokens, hidden, wide, dtype=torch.float32, has_bias=True, weight_dtype=None, width_out=None):
    of_weights, width_out = weight_dtype or dtype, hidden if width_out is None else width_out
    inputs = {"x": randn(tokens, hidden, dtype=dtype)}
    for name in ("gate", "up"):
        inputs[f"{name}_weight"] = randn(wide, hidden, dtype=of_weights, scale=max(1, hidden) ** -0.5)
        inputs[f"{name}_bias"] = randn(wide, dtype=of_weights) if has_bias else None
    inputs["down_weight"] = randn(width_out, wide, dtype=of_weights, scale=max(1, wide) ** -0.5)
    return inputs | {"down_bias": randn(width_out, dtype=of_weights) if has_bias else None}


def _joined(function):
    """The function of weights that are neighbours in memory, whose gradients come back to those it is given."""

    def run(x, gate, gate_bias, up, up_bias, *down):
        first, second = (nn.Parameter(w.detach().clone()) for w in (gate, up))
        join_memory(first, second)
        return function(x, _As.apply(gate, first), gate_bias, _As.apply(up, second), up_bias, *down)

    return run


class _As(torch.autograd.Function):
    """The second tensor, with the gradient of the first."""

    @staticmethod
    def forward(ctx, given, other):
        return other.view_as(other)

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


@pytest.fixture
def small_chunks(monkeypatch):
    """Products of 8 tokens at a time, and what lies between them of 2."""
    monkeypatch.setattr(_chunks, "chunk_tokens", lambda *given: 2 if aten.ELEMENTWISE_BYTES in given else 8)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 13, 31), (64, 48, 192), (0, 8, 16), (5, 3, 0)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("save_pre", "dropout_p"), [(True, 0.0), (False, 0.3)])
def test_torch_backend_matches_the_reference(dtype, shape, has_bias, save_pre, dropout_p):
    inputs, dy = _inputs(*shape, dtype, has_bias), randn(*shape[:2], dtype=dtype)
    options = dict(save_pre=save_pre, dropout_p=dropout_p)
    op, reference = _op("torch", **options), _op("reference", dropout_p=dropout_p)
    assert_matches("gated_mlp", op, _plain(dropout_p=dropout_p), reference, inputs, dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 17, 61])
@pytest.mark.parametrize(("save_pre", "dropout_p"), [(True, 0.3), (False, 0.0)])
@pytest.mark.parametrize("joins", [True, False])
def test_chunks_of_tokens(small_chunks, tokens, dtype, save_pre, dropout_p, joins):
    inputs, dy = _inputs(tokens, 12, 20, dtype, width_out=10), randn(tokens, 10, dtype=dtype)
    op, reference = _op("torch", "silu", save_pre, dropout_p), _op("reference", dropout_p=dropout_p)
    with mock.patch.object(aten, "view_of_neighbours", wraps=aten.view_of_neighbours) as looked:
        assert_matches(
            "gated_mlp", _joined(op) if joins else op, _plain(dropout_p=dropout_p), reference, inputs, dy
        )  # fmt: skip
    assert looked.called


@pytest.mark.parametrize("hidden_act", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_activation(small_chunks, hidden_act, dtype):
    inputs, dy = _inputs(8, 12, 20, dtype), randn(8, 12, dtype=dtype)
    assert_matches("gated_mlp", _op("torch", hidden_act), _plain(hidden_act), _op("reference", hidden_act), inputs, dy)


def test_weights_that_are_neighbours_are_one_product():
    inputs = _inputs(6, 8, 10, has_bias=False)
    given = [nn.Parameter(inputs[name]) for name in ("x", "gate_weight", "up_weight", "down_weight")]
    counts = []
    for joins in (False, True):
        if joins:
            join_memory(*given[1:3])
        with mock.patch.object(aten, "linear", wraps=aten.linear) as product:
            y = _op("torch")(given[0], given[1], None, given[2], None, given[3])
        gate, up = torch.autograd.grad(y.sum(), given[1:3])
        counts.append(product.call_count)
    assert counts == [3, 2]
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()


@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masks_are_those_of_the_reference(small_chunks, backend, dtype):
    """By weights of the identity h itself comes out, and what went into backward comes back."""
    eye, x = torch.eye(37, dtype=dtype), torch.ones(13, 37, dtype=dtype).requires_grad_()
    for save_pre in (True, False):
        y = _op(backend, "relu", save_pre, 0.4)(x, eye, None, eye, None, eye)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        keep = keep_mask(SEED, SITE, _coords(13), 37, 0.4)
        torch.testing.assert_close(y, (keep * dropout_scale(0.4)).to(dtype))
        torch.testing.assert_close(dx, (2 * keep * dropout_scale(0.4)).to(dtype))


@pytest.mark.parametrize("dropout_p", [1.0, 2.0**-18])
def test_all_and_nothing_dropped(dropout_p):
    inputs = _inputs(5, 6, 7)
    made = gradients(_op("torch", dropout_p=dropout_p), inputs, torch.randn(5, 6))
    if dropout_p == 1.0:
        assert torch.equal(made["y"], inputs["down_bias"].expand(5, 6)) and not made["dgate_weight"].any()
    else:
        assert torch.equal(made["y"], _op("torch")(*inputs.values()))


@pytest.mark.parametrize("save_pre", [True, False])
@pytest.mark.parametrize("tokens", [6, 33])
@pytest.mark.parametrize("dtype", HALF)
def test_fp32_parameters_beside_half_precision(small_chunks, dtype, tokens, save_pre):
    inputs, dy = _inputs(tokens, 24, 40, dtype, weight_dtype=torch.float32), randn(tokens, 24, dtype=dtype)
    op = _joined(_op("torch", save_pre=save_pre))
    assert_matches("gated_mlp", op, _plain(), _op("reference"), inputs, dy)
    actual = gradients(op, inputs, dy)
    assert actual.pop("y").dtype == actual.pop("dx").dtype == dtype
    assert {t.dtype for t in actual.values()} == {torch.float32}


def test_one_dtype_for_both_halves_of_the_block():
    x, gate, gate_bias, up, up_bias, down, down_bias = leaves(_inputs(6, 8, 10, torch.bfloat16))
    down, down_bias = (t.detach().float().requires_grad_() for t in (down, down_bias))
    y = ops.gated_mlp(x, gate, gate_bias, up, up_bias, down, down_bias)
    y.sum().backward()
    assert y.dtype == gate.grad.dtype == torch.bfloat16 and down.grad.dtype == down_bias.grad.dtype == torch.float32


@pytest.mark.parametrize("save_pre", [True, False])
@parametrize_wants(*GRADIENTS, sizes=(0, 1, 2, 6, 7))
def test_only_wanted_gradients_are_there(small_chunks, wants, save_pre):
    inputs, dy = _inputs(11, 6, 10), torch.randn(11, 6)
    whole = gradients(_op("reference"), inputs, dy)
    given = [t.clone().requires_grad_(name in wants) for name, t in inputs.items()]
    with mock.patch.object(aten, "gated_mlp_bwd", wraps=aten.gated_mlp_bwd) as backward:
        y = _op("torch", save_pre=save_pre)(*given)
        if not wants:
            assert not y.requires_grad
            return
        y.backward(dy)
    a, _, pre, asked = backward.call_args.args
    joined = {name.replace("gate_", "").replace("up_", "") if "down" not in name else name for name in wants}
    assert asked == joined
    needs_pre = bool(wants - {"down_bias"})
    assert (pre is None) == (not (save_pre and needs_pre))
    assert (a.x is None) == (not ("weight" in asked or (needs_pre and not save_pre)))
    for name, t in zip(inputs, given, strict=True):
        if name in wants:
            torch.testing.assert_close(t.grad, whole[f"d{name}"])
        else:
            assert t.grad is None


def test_nothing_wide_is_made_but_gate_and_up(small_chunks):
    """Of T * I elements, that is; 40 tokens in chunks of 8, and a width at which nothing else has as many."""
    x, gate, _, up, _, down, _ = _inputs(40, 6, 64, has_bias=False).values()
    a = GatedMlp(x, gate, None, up, None, down, None, "silu", 0.0, None, None, 0, False)
    with Sizes() as inference:
        aten.gated_mlp_fwd(a)
    assert max(inference.made) == 8 * 64
    with Sizes() as forward:
        _, pre = aten.gated_mlp_fwd(a._replace(save_pre=True))
    assert [size for size in forward.made if size > 2 * 8 * 64] == [pre.numel()]
    for kept in (pre, None):
        with Sizes() as backward:
            aten.gated_mlp_bwd(a, torch.randn(40, 6), kept, {"x", "weight", "down_weight"})
        assert max(backward.made) == 2 * 8 * 64
        assert 2 * 64 in backward.made and 2 * 64 in inference.made  # what is elementwise, by smaller chunks


def test_what_is_saved():
    given = leaves(_inputs(6, 8, 10, width_out=7))

    def shapes(function, *tensors):
        return sorted(tuple(t.shape) for t in saved(lambda: function(*tensors)))

    x, gate, gate_bias, up, up_bias, down, down_bias = given
    weights = [(7, 10), (10, 8), (10, 8)]
    assert shapes(_op("torch"), *given) == [(6, 8), (6, 20), *weights]  # x, gate and up, the weights: no product
    assert shapes(_op("torch", save_pre=False), *given) == [(6, 8), (7, 10), (10,), (10,), (10, 8), (10, 8)]
    frozen = x, gate.detach(), gate_bias, up.detach(), up_bias, down, down_bias
    assert shapes(_op("torch"), *frozen) == [(6, 20), *weights]
    assert shapes(_op("torch", dropout_p=0.1), *frozen) == [(1,), (6, 2), (6, 20), *weights]  # seed and coords, no mask
    frozen = x.detach(), gate.detach(), None, up.detach(), None, down.detach(), down_bias
    assert shapes(_op("torch"), *frozen) == weights
    with torch.no_grad():
        assert not saved(lambda: _op("torch")(*given))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("save_pre", [True, False])
def test_autocast(compiles, save_pre):
    op = _op("torch", save_pre=save_pre)
    assert_autocast_agrees("gated_mlp", op, _plain(), _inputs(33, 24, 40), compiles)


@pytest.mark.parametrize("save_pre", [True, False])
def test_checkpointing(small_chunks, save_pre):
    assert_checkpoints(_op("torch", save_pre=save_pre, dropout_p=0.2), _inputs(20, 8, 5), torch.randn(20, 8))


@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("save_pre", [True, False])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(backend, save_pre):
    given = leaves(_inputs(9, 6, 10))
    y, dy = _op(backend, save_pre=save_pre, dropout_p=0.2)(*given), torch.randn(9, 6)
    first = torch.autograd.grad(y, given, dy, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, given, dy)))


@pytest.mark.parametrize("relaid", [lambda t: t.t().contiguous().t(), lambda t: t.repeat_interleave(2, 1)[:, ::2]])
def test_strides(small_chunks, relaid):
    def strided(*tensors):
        return _op("torch")(*(relaid(t) if t.dim() == 2 else t for t in tensors))

    assert_matches("gated_mlp", strided, _plain(), _op("reference"), _inputs(19, 12, 20), relaid(torch.randn(19, 12)))


def test_a_bad_number_spoils_its_token(small_chunks):
    inputs = _inputs(20, 12, 20)
    inputs["x"][13, 5] = float("nan")
    actual = gradients(_op("torch"), inputs, torch.randn(20, 12))
    spoilt = (torch.arange(20)[:, None] == 13).expand(20, 12)
    assert torch.equal(actual["y"].isnan(), spoilt) and torch.equal(actual["dx"].isnan(), spoilt)
    assert actual["dup_weight"].isnan().all() and actual["ddown_bias"].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fp16_overflows_where_plain_torch_does(backend):
    x = torch.full((3, 4), 200.0, dtype=torch.float16)
    x[1] = 0.5
    eye = torch.eye(4, dtype=torch.float16)
    y = ops.gated_mlp(x, 10 * eye, None, eye, None, eye, backend=backend)
    assert not y[0].isfinite().any() and not y[2].isfinite().any() and y[1].isfinite().all()


def test_second_derivatives_are_refused_by_name():
    given = leaves(_inputs(3, 4, 5))
    (dx,) = torch.autograd.grad(ops.gated_mlp(*given).sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_mlp_bwd: second derivatives are not implemented"):
        dx.sum().backward()


@pytest.mark.parametrize(("save_pre", "dropout_p"), [(True, 0.0), (False, 0.3)])
def test_gradcheck_and_opcheck(small_chunks, save_pre, dropout_p):
    given = leaves(_inputs(9, 4, 5, torch.float64))
    assert torch.autograd.gradcheck(_op("torch", save_pre=save_pre, dropout_p=dropout_p), given)
    rest = ("silu", dropout_p, SEED, _coords(9), SITE, save_pre, "auto")
    torch.library.opcheck(torch.ops.bert_fast.gated_mlp_fwd, (*given, *rest))


X, W, B, D, BD = (torch.zeros(shape) for shape in ((2, 4), (6, 4), (6,), (4, 6), (4,)))
C = _coords(2)
BAD = {
    "rank": ((X[0], W, B, W, B, D), {}, ValueError, r"x: expected shape \[T, K\], got \[4\]"),
    "gate": ((X, D, BD, W, B, D), {}, ValueError, r"gate_weight: expected shape \[I, 4\], got \[4, 6\]"),
    "gate bias": ((X, W, BD, W, B, D), {}, ValueError, r"gate_bias: expected shape \[6\], got \[4\]"),
    "up": ((X, W, B, W[:5], B[:5], D), {}, ValueError, r"up_weight: expected shape \[6, 4\], got \[5, 4\]"),
    "up bias": ((X, W, B, W, BD, D), {}, ValueError, r"up_bias: expected shape \[6\], got \[4\]"),
    "gate bias alone": (
        (X, W, B, W, None, D),
        {},
        ValueError,
        "up_bias: expected a Tensor as gate_bias is .*, got None",
    ),
    "up bias alone": ((X, W, None, W, B, D), {}, ValueError, "up_bias: expected None as gate_bias is .*, got a Tensor"),
    "down": ((X, W, B, W, B, W), {}, ValueError, r"down_weight: expected shape \[N, 6\], got \[6, 4\]"),
    "down bias": ((X, W, B, W, B, D, B), {}, ValueError, r"down_bias: expected shape \[4\], got \[6\]"),
    "dtype": ((X.half(), W, B, W, B, D.bfloat16()), {}, TypeError, "down_weight: expected dtype float16 .* or float32"),
    "up dtype": (
        (X.half(), W, B, W.half(), B.half(), D),
        {},
        TypeError,
        r"up_weight: expected dtype float32 \(that of gate_weight\), got float16",
    ),
    "no tensor": ((X, W, B, W, 0.0, D), {}, TypeError, "up_bias: expected a Tensor, got float"),
    "device": (
        (X, W, B, W, B, D.to("meta")),
        {},
        ValueError,
        r"down_weight: expected device cpu \(that of x\), got meta",
    ),
    "name": ((X, W, B, W, B, D), {"hidden_act": "mish"}, ValueError, r"hidden_act: expected one of .*, got 'mish'"),
    "flag": ((X, W, B, W, B, D), {"save_pre": None}, TypeError, "save_pre: expected a bool, got NoneType"),
    "probability": ((X, W, B, W, B, D), {"dropout_p": 1.5}, ValueError, r"dropout_p: expected .* in \[0, 1\], got 1.5"),
    "no seed": ((X, W, B, W, B, D), {"dropout_p": 0.1, "coords": C}, ValueError, "seed: expected a Tensor where"),
    "coords": (
        (X, W, B, W, B, D),
        {"dropout_p": 0.1, "seed": SEED, "coords": _coords(3)},
        ValueError,
        r"coords: expected shape \[2, 2\], got \[3, 2\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    arguments, keywords, error, message = BAD[case]
    with pytest.raises(error, match=message):
        ops.gated_mlp(*arguments, **keywords)


def test_one_bias_of_two_is_refused_by_the_registered_op_too():
    with pytest.raises(ValueError, match="up_bias: expected a Tensor as gate_bias is"):
        torch.ops.bert_fast.gated_mlp_fwd(X, W, B, W, None, D, None, "silu", 0.0, None, None, 0, True, "auto")


def test_meta_tensors_have_shapes():
    x, *parameters = (t.to("meta").requires_grad_() for t in _inputs(6, 8, 10, width_out=7).values())
    y = ops.gated_mlp(x, *parameters)
    y.sum().backward()
    assert y.shape == (6, 7) and [p.grad.shape for p in parameters] == [p.shape for p in parameters]


def test_a_graph_without_breaks_gives_the_same_bits() -> None:
    given = leaves(_inputs(9, 6, 10))
    coords = _coords(9)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return ops.gated_mlp(x, *parameters, dropout_p=0.2, seed=SEED, coords=coords, site=SITE) * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    eager, graph = (torch.autograd.grad(f(*given).sum(), given) for f in (function, compiled))
    assert all(map(torch.equal, eager, graph))
