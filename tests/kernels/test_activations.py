"""The device functions of activations, in the interpreter: every fp16 and bf16 number, against fp64."""

import math

import pytest
import torch
from torch import Tensor

from bert_fast.reference.activations import ACTIVATIONS
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.tolerances import SHORT_FORM_UNITS, SHORT_FORM_UNITS_AT_A_ZERO

pytestmark = pytest.mark.interpreter

NAMES = {"gelu_erf": "gelu", "gelu_tanh": "gelu_new", "silu": "silu", "tanh": "tanh", "relu": "relu"}
# dtype -> (bits of the significand behind the point, exponent of the smallest normal number)
FORMATS = {torch.bfloat16: (7, -126), torch.float16: (10, -14)}
DTYPES = list(FORMATS)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def evaluate():  # type: ignore[no-untyped-def]
    """A function of (x, name, dtype): act(x) and act'(x) in fp32, as evaluated for that output dtype."""
    import triton
    import triton.language as tl

    from bert_fast.triton import _activations

    outs = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    activation, activation_derivative = _activations.activation, _activations.activation_derivative

    @triton.jit
    def kernel(x_ptr, y_ptr, d_ptr, n, NAME: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
        tl.store(y_ptr + offs, activation(x, NAME, OUT), mask=offs < n)
        tl.store(d_ptr + offs, activation_derivative(x, NAME, OUT), mask=offs < n)

    # What the jit function names must be found among its globals.
    kernel.fn.__globals__.update(activation=activation, activation_derivative=activation_derivative, tl=tl)

    def run(x: Tensor, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = x.float().contiguous()
        y, d = torch.empty_like(x), torch.empty_like(x)
        kernel[(-(-x.numel() // 16384),)](x, y, d, x.numel(), NAME=name, OUT=outs[dtype], BLOCK=16384)
        return y, d

    return run


def all_numbers(dtype: torch.dtype) -> Tensor:
    """The 65,536 patterns of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def units(error: Tensor, truth: Tensor, dtype: torch.dtype) -> Tensor:
    """An error in units in the last place of the truth as a number of this dtype, subnormal ones included."""
    bits, smallest = FORMATS[dtype]
    exponent = truth.abs().clamp_min(2.0**smallest).log2().floor()
    return error.abs() / torch.exp2(exponent - bits)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_number(evaluate, name: str, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Errors before rounding, relative to the result itself, down to the smallest subnormal."""
    x = all_numbers(dtype)
    x = x[x.isfinite()]
    value, derivative = evaluate(x, name, dtype)
    truth = ACTIVATIONS[NAMES[name]]
    expected = truth.forward(x.double())
    assert units(value.double() - expected, expected, dtype).max() < SHORT_FORM_UNITS[dtype]
    # x^2 overflows in fp32, here as in PyTorch
    representable = x.double().abs() < 1e19 if name == "gelu_tanh" else torch.ones_like(x, dtype=torch.bool)
    expected = truth.derivative(x.double())
    errors = units(derivative.double() - expected, expected, dtype)[representable]
    near_zero = (expected.abs() < 2e-3)[representable] & (x.abs() < 2)[representable]
    assert errors[~near_zero].max() < SHORT_FORM_UNITS[dtype]
    assert not near_zero.any() or errors[near_zero].max() < SHORT_FORM_UNITS_AT_A_ZERO


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize("name", ["gelu_erf", "gelu_tanh", "silu"])
def test_what_is_not_finite(evaluate, name: str, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    value, derivative = evaluate(torch.tensor([NAN, INF, -INF]), name, dtype)
    assert value[0].isnan() and value[1] == INF and value[2].isnan(), "-inf * 0, as PyTorch has it"
    assert derivative.isnan()[0] and derivative.isnan()[2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
def test_what_is_not_finite_where_the_function_is_bounded(evaluate, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    x = torch.tensor([NAN, INF, -INF])
    value, derivative = evaluate(x, "tanh", dtype)
    assert value[0].isnan() and value[1:].tolist() == [1.0, -1.0]
    assert derivative[0].isnan() and derivative[1:].tolist() == [0.0, 0.0]
    value, derivative = evaluate(x, "relu", dtype)
    assert value[0].isnan() and value[1:].tolist() == [INF, 0.0]
    assert derivative[1:].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize("name", ["gelu_erf", "gelu_tanh", "silu", "tanh"])
def test_zeros_and_subnormals(evaluate, name: str, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Near 0 these functions are x / 2 or x; a zero keeps its sign."""
    x = torch.tensor([0.0, -0.0, 1e-40, -1e-40])
    value, _ = evaluate(x, name, dtype)
    slope = 1.0 if name == "tanh" else 0.5
    assert [math.copysign(1.0, v) for v in value.tolist()] == [1.0, -1.0, 1.0, -1.0]
    assert torch.equal(value.to(torch.bfloat16), (x * slope).to(torch.bfloat16))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_fp32_is_as_good_as_the_reference(evaluate, name: str) -> None:  # type: ignore[no-untyped-def]
    x = torch.cat([torch.linspace(-12, 12, 20001), torch.logspace(-30, 1, 500)])
    truth = ACTIVATIONS[NAMES[name]]
    value, derivative = evaluate(x, name, torch.float32)
    assert_close_to_truth("bias_gelu", "y", value, truth.forward(x), truth.forward(x.double()))
    assert_close_to_truth("bias_gelu", "dx", derivative, truth.derivative(x), truth.derivative(x.double()))
