"""8-bit products: exact sums, the same bits on every back-end and in every batch, and what is refused."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from bert_fast import BackendError, native, ops
from bert_fast.errors import DerivativeError
from bert_fast.reference.linear_int8 import LinearInt8, linear_int8_fwd, quantize_rows, unpacked
from bert_fast.testing.tolerances import ABSOLUTE

LEVELS = ["amx", "avx512_vnni", "avx512", "avx2", "portable"]
SHAPES = [(1, 1, 1), (5, 13, 7), (33, 50, 100), (97, 31, 65), (16, 16, 64), (3, 5, 0), (0, 5, 4), (5, 0, 4)]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The extension with one instruction set forced."""
    module = native.load()
    if module is None or request.param not in module.simd_levels():
        pytest.skip(f"this processor or build has no {request.param}")
    module.force_simd_level(request.param)
    yield module
    module.force_simd_level("auto")


def test_rounding_of_weights_is_that_of_their_definition() -> None:
    weight = torch.randn(37, 101) * torch.logspace(-8, 8, 37)[:, None]
    weight[3] = 0.0
    packed, scale, sums = ops.quantize_weight(weight)
    assert packed.shape == (3, 32, 64) and packed.dtype is torch.int8
    whole = unpacked(packed, 37, 101)
    assert scale[3] == 0.0 and not whole[3].any()
    assert torch.equal(scale, weight.abs().amax(1) / 127)
    assert (whole.abs().amax(1)[scale > 0] == 127).all()
    assert (scale[:, None].double() * whole - weight).abs().le(scale[:, None] * ABSOLUTE["int8_steps"]).all()
    assert torch.equal(sums, whole.sum(1).int())
    everything = unpacked(packed, 48, 128)
    assert not everything[37:].any() and not everything[:, 101:].any()


def test_rows_are_rounded_to_the_nearest_of_256_levels() -> None:
    x = torch.randn(41, 53) * torch.logspace(-8, 8, 41)[:, None] + torch.linspace(-1, 1, 41)[:, None]
    q, scale, zero = quantize_rows(x)
    assert q.min() == 0 and q.max() == 255
    assert ((q - zero[:, None]).double() * scale[:, None] - x).abs().le(scale[:, None] * ABSOLUTE["int8_steps"]).all()
    assert quantize_rows(torch.zeros(1, 4))[0].eq(0).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_instruction_set_has_the_bits_of_the_reference(
    level: ModuleType, shape: tuple[int, int, int], has_bias: bool
) -> None:
    num_tokens, num_columns, k = shape
    x, bias = torch.randn(num_tokens, k), torch.randn(num_columns) if has_bias else None
    weight = ops.quantize_weight(torch.randn(num_columns, k))
    y = ops.linear_int8(x, weight, bias)
    assert torch.equal(y, ops.linear_int8(x, weight, bias, backend="reference"))
    assert torch.equal(y, ops.linear_int8(x.repeat(1, 2)[:, :k], weight, bias))


def test_sums_are_those_of_64_bit_integers(level: ModuleType) -> None:
    """Scales of 1 leave the sums to be seen; the largest have pairs of products that do not fit into 16 bits."""
    k = 4096
    whole = torch.randint(-127, 128, (5, k))
    whole[0], whole[1], whole[:, 0] = -127, 127, 127
    q = torch.randint(0, 256, (4, k))
    q[0], q[1:, 1], q[1:, 2] = 255, 0, 255
    y = ops.linear_int8(q.float(), ops.quantize_weight(whole.float()))
    assert torch.equal(y, (q @ whole.T).float())
    assert y[0, 1] == 255 * 127 * k


def test_a_row_has_the_same_bits_alone_and_by_any_number_of_threads(level: ModuleType) -> None:
    x, weight = torch.randn(450, 96), ops.quantize_weight(torch.randn(140, 96))
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        y = ops.linear_int8(x, weight)
        torch.set_num_threads(2)
        assert torch.equal(ops.linear_int8(x, weight), y)
    finally:
        torch.set_num_threads(num_threads)
    for row in (0, 1, 191, 192, 449):
        assert torch.equal(ops.linear_int8(x[row : row + 1], weight), y[row : row + 1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_gives_nan_in_its_row_alone(level: ModuleType, value: float) -> None:
    x, weight, bias = torch.randn(5, 70), ops.quantize_weight(torch.randn(20, 70)), torch.randn(20)
    expected = ops.linear_int8(x, weight, bias)
    for column in (0, 69):
        given = x.clone()
        given[2, column] = value
        y = ops.linear_int8(given, weight, bias)
        assert y[2].isnan().all() and ops.linear_int8(given, weight, bias, backend="reference")[2].isnan().all()
        assert torch.equal(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_a_weight_that_is_not_finite_gives_nan_in_its_column_alone() -> None:
    weight, x = torch.randn(20, 70), torch.randn(5, 70)
    expected = ops.linear_int8(x, ops.quantize_weight(weight))
    weight[7, 3] = torch.inf
    y = ops.linear_int8(x, ops.quantize_weight(weight))
    assert y[:, 7].isnan().all() and torch.equal(y[:, :7], expected[:, :7])


def test_results_are_near_those_of_fp32() -> None:
    x, weight, bias = torch.randn(64, 384), torch.randn(128, 384), torch.randn(128)
    y, expected = ops.linear_int8(x, ops.quantize_weight(weight), bias), ops.linear(x, weight, bias)
    # Each of K products errs by a rounding of x and one of w, both uniform: variance (s_x^2 w^2 + s_w^2 x^2) / 12.
    s_x, s_w = quantize_rows(x)[1], weight.abs().amax(1) / 127
    variance = (s_x[:, None] ** 2 * weight.square().sum(1) + s_w**2 * x.square().sum(1)[:, None]) / 12
    errors = (y - expected) / variance.sqrt()
    assert 0.5 < errors.square().mean().sqrt() < 1.5


def test_without_the_extension_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(9, 70), ops.quantize_weight(torch.randn(20, 70)), torch.randn(20)
    y = ops.linear_int8(x, weight, bias, backend="torch")
    monkeypatch.setattr(native, "load", lambda: None)
    assert torch.equal(ops.linear_int8(x, weight, bias, backend="torch"), y)
    assert torch.equal(linear_int8_fwd(LinearInt8(x, *weight, bias)), y)


X, WEIGHT = torch.zeros(2, 70), ops.quantize_weight(torch.zeros(20, 70))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.quantize_weight(torch.zeros(3)), ValueError, r"weight: expected shape \[N, K\], got \[3\]"),
        (lambda: ops.quantize_weight(X.half()), TypeError, "weight: expected dtype float32, got float16"),
        (lambda: ops.quantize_weight(torch.zeros(1, 65537)), ValueError, "weight: expected at most 65536 columns"),
        (lambda: ops.linear_int8(X.bfloat16(), WEIGHT), TypeError, "x: expected dtype float32, got bfloat16"),
        (lambda: ops.linear_int8(X[0], WEIGHT), ValueError, r"x: expected shape \[T, K\], got \[70\]"),
        (lambda: ops.linear_int8(X[:, :64], WEIGHT), ValueError, r"packed: expected shape \[2, 16, 64\], got \[2, 32"),
        (lambda: ops.linear_int8(X, X), TypeError, "weight: expected a QuantizedWeight"),
        (lambda: ops.linear_int8(X, WEIGHT, torch.zeros(19)), ValueError, r"bias: expected shape \[20\], got \[19\]"),
        (lambda: ops.linear_int8(X, WEIGHT._replace(scale=X[0, :21])), ValueError, r"sums: expected shape \[21\]"),
        (lambda: ops.linear_int8(X, WEIGHT._replace(packed=WEIGHT.packed.int())), TypeError, "packed: expected dtype"),
        (lambda: ops.linear_int8(X, WEIGHT, backend="triton"), BackendError, "no 'triton' implementation exists"),
        (
            lambda: ops.linear_int8(X.clone().requires_grad_(), WEIGHT),
            DerivativeError,
            "x: expected a Tensor that requires no gradient, .* within torch.inference_mode",
        ),
    ],
    ids=lambda given: "" if callable(given) else str(given)[:30].replace("\\", ""),
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_other_devices_are_refused() -> None:
    from bert_fast import backend

    with pytest.raises(BackendError, match="linear_int8: no back-end can run this call: tensors are on cuda"):
        backend.implementation("linear_int8", backend.OpSpec(torch.device("cuda"), torch.float32))
    with pytest.raises(BackendError, match="back-end 'torch' cannot run this call: tensors are on cuda"):
        backend.implementation("linear_int8", backend.OpSpec(torch.device("cuda"), torch.float32), "torch")


def test_without_gradients_parameters_may_want_them() -> None:
    bias: Tensor = torch.zeros(20, requires_grad=True)
    with torch.no_grad():
        assert not ops.linear_int8(X, WEIGHT, bias).requires_grad
