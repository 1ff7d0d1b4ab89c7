"""The ops bias_gelu and bias_activation: every back-end, autograd, torch.library and torch.compile, messages."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast import backend
from bert_fast.errors import BackendError
from bert_fast.ops.bias_gelu import bias_activation, bias_gelu
from bert_fast.reference import bias_gelu as reference
from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.testing.compare import assert_close_to_truth

BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
PLAIN = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
_fwd = torch.ops.bert_fast.bias_gelu_fwd.default
_bwd = torch.ops.bert_fast.bias_gelu_bwd.default


def leaves(
    *shape: int, dtype: torch.dtype = torch.float32, bias_dtype: torch.dtype | None = None, has_bias: bool = True
) -> dict[str, Tensor]:
    shape = shape or (5, 24)
    named = {"x": torch.randn(shape).to(dtype)}
    if has_bias:
        named["bias"] = torch.randn(shape[-1]).to(bias_dtype or dtype)
    return {name: t.requires_grad_() for name, t in named.items()}


def outputs(name: str, arguments: dict[str, Tensor], hidden_act: str, dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients of a back-end, or of PyTorch itself."""
    if name == "plain":
        x, bias = arguments["x"], arguments.get("bias")
        y = PLAIN[hidden_act](x if bias is None else x + bias).to(x.dtype)
    else:
        y = bias_activation(**arguments, hidden_act=hidden_act, backend=name)
    grads = torch.autograd.grad(y, list(arguments.values()), dy)
    return {"y": y} | {f"d{key}": grad for key, grad in zip(arguments, grads, strict=True)}


def doubled(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().double().requires_grad_() for name, t in arguments.items()}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("hidden_act", PLAIN)
def test_back_ends_agree_with_fp64(name: str, hidden_act: str, has_bias: bool) -> None:
    arguments, dy = leaves(has_bias=has_bias), torch.randn(5, 24)
    truth = outputs("plain", doubled(arguments), hidden_act, dy.double())
    plain = outputs("plain", arguments, hidden_act, dy)
    for key, actual in outputs(name, arguments, hidden_act, dy).items():
        assert_close_to_truth("bias_gelu", key, actual, plain[key], truth[key])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 24), (2, 3, 24), (24,), (3, 1), (2, 0, 24), (0, 7)])
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    arguments, dy = leaves(*shape), torch.randn(shape)
    truth = outputs("plain", doubled(arguments), "gelu", dy.double())
    plain = outputs("plain", arguments, "gelu", dy)
    for key, actual in outputs(name, arguments, "gelu", dy).items():
        assert_close_to_truth("bias_gelu", key, actual, plain[key], truth[key])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bias_dtype", ["fp32", "half"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "tanh"])
def test_half_precision(name: str, dtype: torch.dtype, bias_dtype: str, hidden_act: str) -> None:
    if name == "triton" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates what it stores as bf16")
    arguments = leaves(7, 40, dtype=dtype, bias_dtype=torch.float32 if bias_dtype == "fp32" else dtype)
    dy = torch.randn(7, 40).to(dtype)
    truth = outputs("plain", doubled(arguments), hidden_act, dy.double())
    plain = outputs("reference", arguments, hidden_act, dy)
    got = outputs(name, arguments, hidden_act, dy)
    assert [t.dtype for t in got.values()] == [dtype, dtype, arguments["bias"].dtype]
    for key, actual in got.items():
        output = "dbias_of_half" if key == "dbias" and bias_dtype == "fp32" else key
        assert_close_to_truth("bias_gelu", output, actual, plain[key], truth[key])


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
    bias = torch.randn(24)
    results = []
    for leaf in (x.detach().requires_grad_(), x.detach().clone().contiguous().requires_grad_()):
        y = bias_gelu(leaf, bias, backend=name)
        assert y.is_contiguous() and y.shape == x.shape
        results.append((y, torch.autograd.grad(y.sum(), leaf)[0]))  # an expanded upstream gradient
    for got, expected in zip(*results, strict=True):
        assert_close_to_truth("bias_gelu", "dx", got, expected, expected.double())


def test_gelu_is_a_case_of_activation() -> None:
    x, bias = torch.randn(5, 24), torch.randn(24)
    assert torch.equal(bias_gelu(x, bias), bias_activation(x, bias))
    assert torch.equal(bias_gelu(x, bias, approximate="tanh"), bias_activation(x, bias, hidden_act="gelu_new"))
    assert (bias_gelu(x, bias) - bias_gelu(x, bias, approximate="tanh")).abs().max() > 1e-5


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_gradcheck(name: str) -> None:
    arguments = doubled(leaves(3, 4))
    for hidden_act in PLAIN:
        function = lambda x, bias, act=hidden_act: bias_activation(x, bias, hidden_act=act, backend=name)  # noqa: E731
        assert torch.autograd.gradcheck(function, tuple(arguments.values()))


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_opcheck(name: str, has_bias: bool) -> None:
    t = leaves(has_bias=has_bias)
    torch.library.opcheck(_fwd, (t["x"], t.get("bias"), "gelu", name))
    x, bias = (None if one is None else one.detach() for one in (t["x"], t.get("bias")))
    torch.library.opcheck(_bwd, (torch.randn_like(x), x, bias, "gelu", name))


def saved(arguments: dict[str, Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        bias_gelu(**arguments)
    return kept


def test_saves_its_inputs_alone() -> None:
    arguments = leaves(2, 3, 24)
    kept = saved(arguments)
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in arguments.values())
    with torch.no_grad():
        assert saved(arguments) == []


@pytest.mark.parametrize("name", BACKENDS)
def test_outputs_alias_nothing(name: str) -> None:
    x, bias = (t.detach() for t in leaves().values())
    for hidden_act in PLAIN:  # ReLU of positive numbers could return them
        out = (_fwd(x.abs(), None, hidden_act, name), *_bwd(x, x, bias, hidden_act, name))
        assert len({t.data_ptr() for t in (*out, x, bias)}) == 5


def test_backward_runs_where_forward_was_asked_to_run() -> None:
    arguments = leaves()
    with backend.use_backend("reference"):
        y = bias_gelu(**arguments)
    dy = torch.randn_like(y)
    expected = reference.bias_gelu_bwd(BiasGelu(*(t.detach() for t in arguments.values()), "gelu"), dy)
    gradients = torch.autograd.grad(y, list(arguments.values()), dy)
    assert all(torch.equal(got, expected[name]) for name, got in zip(arguments, gradients, strict=True))


def test_autocast_leaves_the_dtype_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert bias_gelu(torch.randn(2, 3)).dtype == torch.float32
        assert bias_gelu(torch.randn(2, 3).bfloat16(), torch.randn(3)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": [[1.0]]}, TypeError, "x: expected a Tensor, got list"),
        ({"x": torch.zeros(())}, ValueError, r"x: expected shape \[\.\.\., N\] with at least one column, got \[\]"),
        ({"x": torch.zeros(5, 0)}, ValueError, r"x: expected shape .* at least one column, got \[5, 0\]"),
        ({"x": torch.zeros(5, 24).long()}, TypeError, "x: expected dtype float32 or .*, got int64"),
        ({"bias": torch.zeros(23)}, ValueError, r"bias: expected shape \[24\], got \[23\]"),
        ({"bias": torch.zeros(24).half()}, TypeError, "bias: expected dtype float32, got float16"),
        ({"bias": torch.zeros(24, device="meta")}, ValueError, "bias: expected device cpu"),
        ({"bias": 1.0}, TypeError, "bias: expected a Tensor, got float"),
        ({"hidden_act": "geglu"}, ValueError, r"hidden_act: expected one of .*'gelu'.*, got 'geglu'"),
        ({"hidden_act": F.gelu}, TypeError, "hidden_act: expected a string, got"),
        ({"backend": "cuda"}, BackendError, "expected one of .*, got 'cuda'"),
    ],
)
def test_messages(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bias_activation(**(leaves() | changed))


def test_message_of_approximate() -> None:
    with pytest.raises(ValueError, match="approximate: expected one of none, tanh, got 'erf'"):
        bias_gelu(torch.zeros(2, 3), approximate="erf")


def test_triton_says_why_it_cannot_run() -> None:
    with pytest.raises(BackendError, match=r"dtype torch\.float64 is none of"):
        bias_gelu(torch.zeros(2, 3).double(), backend="triton")
