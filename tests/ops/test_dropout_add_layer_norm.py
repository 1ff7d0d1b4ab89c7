"""The op dropout_add_layer_norm: every back-end, autograd, torch.library and torch.compile contracts, messages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.errors import BackendError
from bert_fast.ops.dropout_add_layer_norm import dropout_add_layer_norm
from bert_fast.reference import dropout_add_layer_norm as reference
from bert_fast.testing.compare import assert_close_to_truth

BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
SITE = 5
_fwd = torch.ops.bert_fast.dropout_add_layer_norm_fwd.default
_bwd = torch.ops.bert_fast.dropout_add_layer_norm_bwd.default


def leaves(num_tokens: int = 5, hidden_size: int = 24, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    x, residual = torch.randn(2, num_tokens, hidden_size).to(dtype).unbind()
    weight, bias, x_bias = torch.randn(3, hidden_size).unbind()
    named = {"x": x, "residual": residual, "weight": weight, "bias": bias, "x_bias": x_bias}
    return {name: t.clone().requires_grad_() for name, t in named.items()}


def mask(num_tokens: int = 5, dropout_p: float = 0.3) -> dict[str, Any]:
    positions = torch.arange(num_tokens, dtype=torch.int32)
    coords = torch.stack([positions // 2, positions % 2], dim=1)
    return {"dropout_p": dropout_p, "seed": torch.tensor([77]), "coords": coords, "site": SITE}


def outputs(name: str, arguments: dict[str, Any], dy: Tensor) -> dict[str, Tensor]:
    y = dropout_add_layer_norm(**arguments, backend=name)
    inputs = {key: t for key, t in arguments.items() if isinstance(t, Tensor) and t.requires_grad}
    grads = torch.autograd.grad(y, list(inputs.values()), dy)
    return {"y": y} | {f"d{key}": grad for key, grad in zip(inputs, grads, strict=True)}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_back_ends_agree_with_fp64(name: str, dropout_p: float, has_bias: bool) -> None:
    arguments = leaves() | (mask(dropout_p=dropout_p) if dropout_p else {})
    if not has_bias:
        arguments["x_bias"] = None
    dy = torch.randn(5, 24)
    double = {
        key: t.detach().double().requires_grad_() if isinstance(t, Tensor) and t.requires_grad else t
        for key, t in arguments.items()
    }
    truth = outputs("reference", double, dy.double())
    plain = outputs("reference", arguments, dy)
    for key, actual in outputs(name, arguments, dy).items():
        assert_close_to_truth("dropout_add_layer_norm", key, actual, plain[key], truth[key])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_fp32_parameters(name: str, dtype: torch.dtype) -> None:
    arguments = leaves(dtype=dtype) | mask()
    dy = torch.randn(5, 24).to(dtype)
    got = outputs(name, arguments, dy)
    assert got["y"].dtype == got["dx"].dtype == got["dresidual"].dtype == dtype
    assert got["dweight"].dtype == got["dbias"].dtype == got["dx_bias"].dtype == torch.float32
    assert torch.isfinite(torch.cat([t.float().flatten() for t in got.values()])).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_upstream_gradient_may_be_expanded_and_inputs_transposed(name: str) -> None:
    arguments = leaves() | mask()
    expected = outputs(name, arguments, torch.ones(5, 24))
    arguments["x"] = arguments["x"].detach().t().contiguous().t().requires_grad_()
    y = dropout_add_layer_norm(**arguments, backend=name)
    assert y.is_contiguous()
    y.sum().backward()
    floor = (arguments["x"].grad - expected["dx"]).abs().max()
    assert floor == 0


@pytest.mark.parametrize("name", BACKENDS)
def test_no_rows(name: str) -> None:
    arguments = leaves(num_tokens=0) | mask(0)
    y = dropout_add_layer_norm(**arguments, backend=name)
    y.sum().backward()
    assert y.shape == (0, 24)
    assert not arguments["weight"].grad.any()


@pytest.mark.parametrize("name", BACKENDS)
def test_outputs_alias_nothing(name: str) -> None:
    arguments = leaves()
    x, residual, weight, bias = (arguments[key].detach() for key in ("x", "residual", "weight", "bias"))
    with torch.no_grad():
        out = _fwd(x * 0, residual, None, weight, bias, 1e-5, 0.0, None, None, 0, name)
    addresses = [t.data_ptr() for t in (*out, x, residual, weight, bias)]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_opcheck(name: str, dropout_p: float) -> None:
    t = leaves()
    masks = (0.3, *[mask()[key] for key in ("seed", "coords", "site")]) if dropout_p else (0.0, None, None, SITE)
    torch.library.opcheck(_fwd, (t["x"], t["residual"], t["x_bias"], t["weight"], t["bias"], 1e-5, *masks, name))
    h, dy = (t[key].detach() for key in ("x", "residual"))
    torch.library.opcheck(_bwd, (dy, h, h.mean(1), h.std(1), t["weight"].detach(), *masks, name))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_full_graph_compile_without_recompiling_for_new_lengths(compiler: str) -> None:
    graphs, graphs_of_first_length = 0, 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(dropout_add_layer_norm, fullgraph=True, backend=counting, dynamic=True)
    for num_tokens in (5, 7, 12):
        arguments = leaves(num_tokens) | mask(num_tokens)
        y = compiled(**arguments)
        graphs_of_first_length = graphs_of_first_length or graphs
        expected = dropout_add_layer_norm(**arguments)
        assert torch.equal(y, expected)
        dy = torch.randn_like(y)
        inputs = [t for t in arguments.values() if isinstance(t, Tensor) and t.requires_grad]
        for got, want in zip(
            torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True
        ):
            assert torch.equal(got, want)
    assert graphs == graphs_of_first_length > 0


def saved(arguments: dict[str, Any]) -> list[Tensor]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        dropout_add_layer_norm(**arguments, backend="reference")
    return kept


def test_saves_one_activation() -> None:
    arguments = leaves() | mask()
    sizes = sorted(t.numel() for t in saved(arguments))
    assert sizes == sorted([5 * 24, 5, 5, 24, 1, 10])  # h, mean, rstd, weight, seed, coords
    assert sorted(t.numel() for t in saved(leaves())) == sorted([5 * 24, 5, 5, 24])


def test_saves_nothing_without_gradients() -> None:
    with torch.no_grad():
        assert saved(leaves() | mask()) == []


def test_backward_runs_where_forward_was_asked_to_run() -> None:
    arguments = leaves() | mask()
    with backend.use_backend("reference"):
        y = dropout_add_layer_norm(**arguments)
    dy = torch.randn_like(y)
    x, residual = arguments["x"].detach(), arguments["residual"].detach()
    _, h, mean, rstd = reference.dropout_add_layer_norm_fwd(
        x, residual, arguments["x_bias"].detach(), arguments["weight"].detach(), arguments["bias"].detach(), 1e-12,
        *mask().values(),
    )  # fmt: skip
    expected = reference.dropout_add_layer_norm_bwd(dy, h, mean, rstd, arguments["weight"].detach(), *mask().values())
    assert torch.equal(torch.autograd.grad(y, arguments["x"], dy)[0], expected[0])


def test_autocast_casts_activations_and_keeps_parameters() -> None:
    arguments = leaves() | mask()
    with torch.autocast("cpu", torch.bfloat16):
        y = dropout_add_layer_norm(**arguments)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert arguments["x"].grad.dtype == arguments["weight"].grad.dtype == torch.float32


def test_a_probability_that_rounds_to_zero_drops_nothing() -> None:
    arguments = leaves()
    assert torch.equal(
        dropout_add_layer_norm(**arguments, **mask(dropout_p=2**-18)), dropout_add_layer_norm(**arguments)
    )


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": [[1.0]]}, TypeError, "x: expected a Tensor, got list"),
        ({"x": torch.zeros(5, 2, 24)}, ValueError, r"x: expected shape \[T, H\], got \[5, 2, 24\]"),
        ({"x": torch.zeros(5, 0)}, ValueError, r"x: expected at least one column"),
        ({"x": torch.zeros(5, 24, dtype=torch.int64)}, TypeError, "x: expected dtype float32 or .*, got int64"),
        ({"residual": torch.zeros(4, 24)}, ValueError, r"residual: expected shape \[5, 24\], got \[4, 24\]"),
        ({"residual": torch.zeros(5, 24).half()}, TypeError, "residual: expected dtype float32, got float16"),
        ({"residual": torch.zeros(5, 24, device="meta")}, ValueError, "residual: expected device cpu"),
        ({"weight": torch.zeros(23)}, ValueError, r"weight: expected shape \[24\], got \[23\]"),
        ({"weight": torch.zeros(24).double()}, TypeError, "weight: expected dtype float32, got float64"),
        ({"weight": torch.zeros(24, device="meta")}, ValueError, "weight: expected device cpu"),
        ({"bias": None}, TypeError, "bias: expected a Tensor, got NoneType"),
        ({"bias": torch.zeros(24).half()}, TypeError, "bias: expected dtype float32, got float16"),
        ({"x_bias": torch.zeros(25)}, ValueError, r"x_bias: expected shape \[24\], got \[25\]"),
        ({"dropout_p": -0.1}, ValueError, r"dropout_p: expected a probability in \[0, 1\], got -0.1"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p: expected a probability in \[0, 1\], got 1.5"),
        ({"dropout_p": float("nan")}, ValueError, r"dropout_p: expected a probability in \[0, 1\], got nan"),
        ({"seed": None}, ValueError, "seed: expected a Tensor where dropout_p is 0.3, got None"),
        ({"coords": None}, ValueError, "coords: expected a Tensor where dropout_p is 0.3, got None"),
        ({"seed": torch.tensor([1.0])}, TypeError, "seed: expected dtype int64, got float32"),
        ({"seed": torch.tensor(1)}, ValueError, r"seed: expected shape \[1\], got \[\]"),
        ({"coords": torch.zeros(4, 2).int()}, ValueError, r"coords: expected shape \[5, 2\], got \[4, 2\]"),
        ({"coords": torch.zeros(5, 2, dtype=torch.int64)}, TypeError, "coords: expected dtype int32, got int64"),
        ({"site": -1}, ValueError, r"site: expected a number in \[0, 2\*\*31\), got -1"),
        ({"backend": "cuda"}, BackendError, "expected one of .*, got 'cuda'"),
    ],
)  # fmt: skip
def test_messages(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dropout_add_layer_norm(**(leaves() | mask() | changed))


def test_triton_says_why_it_cannot_run() -> None:
    arguments = {key: t.detach().double() for key, t in leaves().items()}
    with pytest.raises(BackendError, match=r"dtype torch\.float64 is none of"):
        dropout_add_layer_norm(**arguments, backend="triton")
    wide = torch.zeros(1, 8200)
    with pytest.raises(BackendError, match="hidden size 8200 exceeds 8192"):
        dropout_add_layer_norm(wide, wide, wide[0], wide[0], backend="triton")
