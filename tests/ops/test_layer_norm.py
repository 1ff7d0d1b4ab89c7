"""The op layer_norm: every back-end, autograd, torch.library and torch.compile contracts, messages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.errors import BackendError
from bert_fast.ops.layer_norm import layer_norm
from bert_fast.reference import layer_norm as reference
from bert_fast.reference.layer_norm import LayerNorm
from bert_fast.testing.compare import assert_close_to_truth

BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
HALVES = [torch.float16, torch.bfloat16]
_fwd = torch.ops.bert_fast.layer_norm_fwd.default
_bwd = torch.ops.bert_fast.layer_norm_bwd.default


def leaves(*shape: int, dtype: torch.dtype = torch.float32, parameters: torch.dtype | None = None) -> dict[str, Tensor]:
    shape = shape or (5, 24)
    weight, bias = torch.randn(2, shape[-1]).to(parameters or torch.float32).unbind()
    named = {"x": torch.randn(shape).to(dtype), "weight": weight, "bias": bias}
    return {name: t.clone().requires_grad_() for name, t in named.items()}


def outputs(name: str, arguments: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients of a back-end, or of PyTorch itself."""
    if name == "plain":
        x, weight, bias = arguments.values()
        y = torch.nn.functional.layer_norm(x, weight.shape, weight, bias, 1e-5)
    else:
        y = layer_norm(**arguments, eps=1e-5, backend=name)
    grads = torch.autograd.grad(y, list(arguments.values()), dy)
    return {"y": y} | {f"d{key}": grad for key, grad in zip(arguments, grads, strict=True)}


def doubled(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().double().requires_grad_() for name, t in arguments.items()}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", [(5, 24), (1, 24), (2, 3, 24), (24,), (3, 1), (2, 0, 24)])
def test_back_ends_agree_with_fp64(name: str, shape: tuple[int, ...]) -> None:
    arguments, dy = leaves(*shape), torch.randn(shape)
    truth = outputs("reference", doubled(arguments), dy.double())
    plain = outputs("plain", arguments, dy)
    for key, actual in outputs(name, arguments, dy).items():
        assert_close_to_truth("layer_norm", key, actual, plain[key], truth[key])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("parameters", ["fp32", "half"])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_has_fp32_statistics(name: str, dtype: torch.dtype, parameters: str) -> None:
    """Rows off zero: with statistics rounded to half precision y would be off by several units in the last place."""
    if name == "triton" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates what it stores as bf16")
    arguments = leaves(7, 768, dtype=dtype, parameters=torch.float32 if parameters == "fp32" else dtype)
    arguments["x"] = (arguments["x"].detach() - 4).requires_grad_()
    dy = torch.randn(7, 768).to(dtype)
    truth = outputs("reference", doubled(arguments), dy.double())
    plain = outputs("reference", arguments, dy)
    got = outputs(name, arguments, dy)
    assert [t.dtype for t in got.values()] == [dtype, dtype, arguments["weight"].dtype, arguments["weight"].dtype]
    for key, actual in got.items():
        assert_close_to_truth("layer_norm", key, actual, plain[key], truth[key])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced", "permuted"])
def test_any_strides(name: str, layout: str) -> None:
    x = torch.randn(2, 5, 24)
    x = {
        "transposed": x[0].t().contiguous().t(),
        "expanded": x[0, :1].expand(5, 24),
        "sliced": x[:, 1:4],
        "permuted": x.transpose(0, 1),
    }[layout]
    parameters = [t.detach() for t in list(leaves().values())[1:]]
    results = []
    for leaf in (x.detach().requires_grad_(), x.detach().clone().contiguous().requires_grad_()):
        y = layer_norm(leaf, *parameters, backend=name)
        assert y.is_contiguous() and y.shape == x.shape
        results.append((y, torch.autograd.grad(y, leaf, torch.ones(1, 1).expand(y.shape) * 3 + y.detach())[0]))
    for got, expected in zip(*results, strict=True):
        assert_close_to_truth("layer_norm", "dx", got, expected, expected.double())


@pytest.mark.parametrize("name", BACKENDS)
def test_no_rows(name: str) -> None:
    arguments = leaves(0, 24)
    y = layer_norm(**arguments, backend=name)
    y.sum().backward()
    assert y.shape == (0, 24)
    assert not arguments["weight"].grad.any() and not arguments["bias"].grad.any()


@pytest.mark.parametrize("name", BACKENDS)
def test_outputs_alias_nothing(name: str) -> None:
    x, weight, bias = (t.detach() for t in leaves().values())
    out = _fwd(x, weight, bias, 1e-5, name)
    addresses = [t.data_ptr() for t in (*out, x, weight, bias)]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_not_finite_stays_in_its_row(name: str) -> None:
    x, weight, bias = (t.detach() for t in leaves().values())
    x[1, 3], x[3, 0] = float("inf"), float("nan")
    y = layer_norm(x, weight, bias, backend=name)
    assert torch.equal(y.isfinite().all(1), torch.tensor([True, False, True, False, True]))


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_opcheck(name: str) -> None:
    t = leaves()
    torch.library.opcheck(_fwd, (*t.values(), 1e-5, name))
    x, weight, _ = (one.detach() for one in t.values())
    torch.library.opcheck(_bwd, (torch.randn_like(x), x, weight, x.mean(1), x.std(1), name))


def saved(arguments: dict[str, Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer_norm(**arguments, backend="reference")
    return kept


def test_saves_its_input_and_two_numbers_a_row() -> None:
    arguments = leaves(2, 3, 24)
    kept = saved(arguments)
    assert sorted(t.numel() for t in kept) == [6, 6, 24, 6 * 24]
    assert any(t.data_ptr() == arguments["x"].data_ptr() for t in kept), "x is saved as it is, not copied"
    with torch.no_grad():
        assert saved(arguments) == []


def test_backward_runs_where_forward_was_asked_to_run() -> None:
    arguments = leaves()
    with backend.use_backend("reference"):
        y = layer_norm(**arguments)
    dy = torch.randn_like(y)
    a = LayerNorm(*(t.detach() for t in arguments.values()), 1e-12)
    _, mean, rstd = reference.layer_norm_fwd(a)
    expected = reference.layer_norm_bwd(a, dy, mean, rstd)
    gradients = torch.autograd.grad(y, list(arguments.values()), dy)
    assert all(torch.equal(got, expected[name]) for name, got in zip(arguments, gradients, strict=True))


def test_autocast_casts_x_and_keeps_parameters() -> None:
    arguments = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer_norm(**arguments)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert arguments["x"].grad.dtype == arguments["weight"].grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": [[1.0]]}, TypeError, "x: expected a Tensor, got list"),
        ({"x": torch.zeros(())}, ValueError, r"x: expected shape \[\.\.\., H\] with at least one column, got \[\]"),
        ({"x": torch.zeros(5, 0)}, ValueError, r"x: expected shape .* at least one column, got \[5, 0\]"),
        ({"x": torch.zeros(5, 24, dtype=torch.int64)}, TypeError, "x: expected dtype float32 or .*, got int64"),
        ({"x": torch.zeros(5, 25)}, ValueError, r"weight: expected shape \[25\], got \[24\]"),
        ({"weight": torch.zeros(2, 12)}, ValueError, r"weight: expected shape \[24\], got \[2, 12\]"),
        ({"weight": torch.zeros(24).double()}, TypeError, "weight: expected dtype float32, got float64"),
        ({"weight": torch.zeros(24).half()}, TypeError, "weight: expected dtype float32, got float16"),
        ({"weight": torch.zeros(24, device="meta")}, ValueError, "weight: expected device cpu"),
        ({"weight": None}, TypeError, "weight: expected a Tensor, got NoneType"),
        ({"bias": torch.zeros(23)}, ValueError, r"bias: expected shape \[24\], got \[23\]"),
        ({"bias": torch.zeros(24).half()}, TypeError, "bias: expected dtype float32, got float16"),
        ({"bias": torch.zeros(24, device="meta")}, ValueError, "bias: expected device cpu"),
        ({"backend": "cuda"}, BackendError, "expected one of .*, got 'cuda'"),
    ],
)
def test_messages(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layer_norm(**(leaves() | changed))


def test_triton_says_why_it_cannot_run() -> None:
    with pytest.raises(BackendError, match=r"dtype torch\.float64 is none of"):
        layer_norm(**doubled(leaves()), backend="triton")
    with pytest.raises(BackendError, match="hidden size 8200 exceeds 8192"):
        layer_norm(**leaves(1, 8200), backend="triton")
