"""The op dropout_add_layer_norm: every back-end, autograd, torch.library and torch.compile contracts, messages."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bert_fast import backend, native
from bert_fast.errors import BackendError
from bert_fast.ops.dropout_add_layer_norm import dropout_add_layer_norm
from bert_fast.reference import dropout_add_layer_norm as reference
from bert_fast.reference.dropout_add_layer_norm import SAVES, max_shift
from bert_fast.testing.compare import assert_close_to_truth

BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
SITE = 5
_fwd = torch.ops.bert_fast.dropout_add_layer_norm_fwd.default
_bwd = torch.ops.bert_fast.dropout_add_layer_norm_bwd.default


def leaves(
    num_tokens: int = 5, hidden_size: int = 24, dtype: torch.dtype = torch.float32, *, suffices: bool = True
) -> dict[str, Tensor]:
    """suffices: parameters with which backward needs nothing but the output; without, one weight is 0."""
    x, residual = torch.randn(2, num_tokens, hidden_size).to(dtype).unbind()
    weight, bias, x_bias = torch.randn(3, hidden_size).unbind()
    weight = torch.where(weight < 0, weight - 0.2, weight + 0.2)
    bias = 1.45 * weight * bias.tanh()
    if not suffices:
        weight[7] = 0.0
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
@pytest.mark.parametrize("suffices", [False, True])
def test_back_ends_agree_with_fp64(name: str, dropout_p: float, has_bias: bool, suffices: bool) -> None:
    arguments = leaves(suffices=suffices) | (mask(dropout_p=dropout_p) if dropout_p else {})
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


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("aligned", [False, True])
def test_gradients_from_the_output_err_little_even_at_the_limit(name: str, dtype: torch.dtype, aligned: bool) -> None:
    """Every bias as large as it may be, parameters in fp32, and gradients that plain torch has within a rounding.

    aligned: an upstream gradient in the direction of the normalised row, where its error weighs most.
    """
    x, residual = torch.randn(2, 512, 768).to(dtype).unbind()
    weight = (torch.rand(768) + 0.3) * torch.randn(768).sign()
    bias = max_shift(dtype) * weight * torch.randn(768).sign()
    dy = torch.randn(512, 768)
    if aligned:
        dy += torch.nn.functional.layer_norm((x + residual).float(), (768,)) / weight
    dy = dy.to(dtype)
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    arguments = {key: t.requires_grad_() for key, t in inputs.items()}
    y, kept = saved(arguments, name)
    assert any(t.data_ptr() == y.data_ptr() for t in kept)

    def plain(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm((residual + x).to(weight.dtype), (768,), weight, bias, 1e-12).to(x.dtype)

    def gradients(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(y, leaves, dy.to(y.dtype)))

    doubles = [t.detach().double().requires_grad_() for t in inputs.values()]
    results = (gradients(y, list(inputs.values())), gradients(plain(**inputs), list(inputs.values())),
               gradients(plain(*doubles), doubles))  # fmt: skip
    for key, actual, stock, truth in zip(inputs, *results, strict=True):
        assert_close_to_truth("dropout_add_layer_norm", f"d{key}", actual, stock, truth)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("suffices", [False, True])
def test_half_precision_with_fp32_parameters(name: str, dtype: torch.dtype, suffices: bool) -> None:
    arguments = leaves(dtype=dtype, suffices=suffices) | mask()
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
    for saves in SAVES:
        with torch.no_grad():
            out = _fwd(x * 0, residual, None, weight, bias, 1e-5, 0.0, None, None, 0, saves, name)
        addresses = [t.data_ptr() for t in (*out, x, residual, weight, bias) if t.numel()]
        assert len(set(addresses)) == len(addresses) == (7 if saves == "output" else 8)


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("saves", "suffices"), [("input", False), ("output", True), ("device", False)])
def test_opcheck(name: str, dropout_p: float, saves: str, suffices: bool) -> None:
    # Two runs are compared, also in an h that nobody wrote: so "device" is checked with weights that make it written.
    t = leaves(suffices=suffices)
    masks = (0.3, *[mask()[key] for key in ("seed", "coords", "site")]) if dropout_p else (0.0, None, None, SITE)
    torch.library.opcheck(_fwd, (t["x"], t["residual"], t["x_bias"], t["weight"], t["bias"], 1e-5, *masks, saves, name))
    h, dy, weight, bias = (t[key].detach() for key in ("x", "residual", "weight", "bias"))
    kept = {"input": (None, h, h.mean(1)), "output": (h, None, None), "device": (h, h, h.mean(1))}[saves]
    torch.library.opcheck(_bwd, (dy, *kept, h.std(1), weight, bias, *masks, saves, name))


@pytest.mark.parametrize("suffices", [True, False])
def test_full_graph_compile_without_recompiling_for_new_lengths(suffices: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(dropout_add_layer_norm, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (5, 7, 12):
            arguments = leaves(num_tokens, suffices=suffices) | mask(num_tokens)
            y, expected = compiled(**arguments), dropout_add_layer_norm(**arguments)
            assert torch.equal(y, expected)
            dy = torch.randn_like(y)
            inputs = [t for t in arguments.values() if isinstance(t, Tensor) and t.requires_grad]
            pairs = zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True)
            assert all(torch.equal(got, want) for got, want in pairs)


def saved(arguments: dict[str, Any], name: str = "torch") -> tuple[Tensor, list[Tensor]]:
    """The output and what is saved for backward."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = dropout_add_layer_norm(**arguments, backend=name)
    return y, kept


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saves_its_output_where_the_weights_allow(name: str, dtype: torch.dtype) -> None:
    """Of [T, H] there is nothing but the very tensor that the caller gets."""
    arguments = leaves(dtype=dtype) | mask()
    y, kept = saved(arguments, name)
    assert sorted(t.numel() for t in kept) == sorted([5 * 24, 5, 24, 24, 1, 10])  # y, rstd, weight, bias, seed, coords
    assert [t.data_ptr() for t in kept if t.numel() == y.numel()] == [y.data_ptr()]
    assert sorted(t.numel() for t in saved(leaves(dtype=dtype), name)[1]) == sorted([5 * 24, 5, 24, 24])


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_saves_its_input_where_they_do_not(name: str) -> None:
    y, kept = saved(leaves(suffices=False) | mask(), name)
    assert sorted(t.numel() for t in kept) == sorted([5 * 24, 5, 5, 24, 24, 1, 10])  # h and mean in place of y
    assert not any(t.data_ptr() == y.data_ptr() for t in kept)


def test_without_the_extension_the_decision_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    for suffices in (False, True):
        y, kept = saved(leaves(suffices=suffices))
        assert any(t.data_ptr() == y.data_ptr() for t in kept) == suffices


def test_changing_the_output_in_place_before_backward_is_noticed() -> None:
    y = dropout_add_layer_norm(**leaves())
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("suffices", [False, True])
def test_gradients_being_wanted_does_not_change_a_bit_of_the_output(dtype: torch.dtype, suffices: bool) -> None:
    """So a checkpoint's first run, without gradients, and its second give the same."""
    arguments = leaves(dtype=dtype, suffices=suffices) | mask()
    with torch.no_grad():
        expected = dropout_add_layer_norm(**arguments)
    assert torch.equal(dropout_add_layer_norm(**arguments), expected)


def test_parameters_of_another_tensor_type_are_not_looked_at() -> None:
    """Fake tensors and other stand-ins have no values: such a call leaves the choice to the implementation."""
    with FakeTensorMode():
        y, kept = saved(leaves())
    assert y.shape == (5, 24)
    assert sum(t.numel() == 5 * 24 for t in kept) == 2  # y and h


def test_saves_nothing_without_gradients() -> None:
    with torch.no_grad():
        assert saved(leaves() | mask())[1] == []


def test_backward_runs_where_forward_was_asked_to_run() -> None:
    arguments = leaves() | mask()
    with backend.use_backend("reference"):
        output = dropout_add_layer_norm(**arguments)
    dy = torch.randn_like(output)
    x, residual = arguments["x"].detach(), arguments["residual"].detach()
    weight, bias = arguments["weight"].detach(), arguments["bias"].detach()
    a = reference.DropoutAddLayerNorm(
        x, residual, arguments["x_bias"].detach(), weight, bias, 1e-12, *mask().values(), "output"
    )
    y, _, _, rstd = reference.dropout_add_layer_norm_fwd(a)
    expected = reference.dropout_add_layer_norm_bwd(a, dy, y, None, None, rstd)["x"]
    assert torch.equal(torch.autograd.grad(output, arguments["x"], dy)[0], expected)


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
        ({"residual": torch.zeros(5, 24).half()}, TypeError, r"residual: .* float32 \(that of x\), got float16"),
        ({"residual": torch.zeros(5, 24, device="meta")}, ValueError, "residual: expected device cpu"),
        ({"weight": torch.zeros(23)}, ValueError, r"weight: expected shape \[24\], got \[23\]"),
        ({"weight": torch.zeros(24).double()}, TypeError, "weight: expected dtype float32, got float64"),
        ({"weight": torch.zeros(24, device="meta")}, ValueError, "weight: expected device cpu"),
        ({"bias": None}, TypeError, "bias: expected a Tensor, got NoneType"),
        ({"bias": torch.zeros(24).half()}, TypeError, r"bias: .* float32 \(that of weight\), got float16"),
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
