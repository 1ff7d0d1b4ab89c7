"""linear: the torch back-end against the reference, what is computed and saved, autocast, both GEMM libraries."""

from threading import Thread
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from bert_fast import ops
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.torch import _gemm
from bert_fast.torch import linear as aten
from tests.wants import parametrize_wants

from .linear_cases import assert_autocast_agrees, assert_checkpoints, assert_matches, gradients, leaves, randn, saved

HALF = (torch.float16, torch.bfloat16)


def _torch(x, weight, bias):
    return ops.linear(x, weight, bias, backend="torch")


def _reference(x, weight, bias):
    return ops.linear(x, weight, bias, backend="reference")


def _plain(x, weight, bias):
    """PyTorch's own, with wider parameters rounded as the op rounds them."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _inputs(tokens, width_in, width_out, dtype=torch.float32, has_bias=True, weight_dtype=None):
    wide = weight_dtype or dtype
    return {
        "x": randn(tokens, width_in, dtype=dtype),
        "weight": randn(width_out, width_in, dtype=wide),
        "bias": randn(width_out, dtype=wide) if has_bias else None,
    }


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (7, 13, 31), (64, 48, 192), (0, 8, 16), (5, 0, 3), (1, 30, 17), (9, 5, 0)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_torch_backend_matches_the_reference(dtype, shape, has_bias):
    inputs = _inputs(*shape, dtype, has_bias)
    assert_matches("linear", _torch, _plain, _reference, inputs, randn(shape[0], shape[2], dtype=dtype))


@pytest.mark.parametrize("backend", [_torch, _reference])
@pytest.mark.parametrize("dtype", HALF)
def test_fp32_parameters_beside_half_precision(dtype, backend):
    inputs = _inputs(33, 24, 40, dtype, weight_dtype=torch.float32)
    dy = randn(33, 40, dtype=dtype)
    assert_matches("linear", backend, _plain, _reference, inputs, dy)
    actual = gradients(backend, inputs, dy)
    assert actual["y"].dtype == actual["dx"].dtype == dtype
    assert actual["dweight"].dtype == actual["dbias"].dtype == torch.float32


@pytest.mark.parametrize("by_onednn", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 3, 5), (1, 40, 24), (24, 1, 40), (37, 24, 65), (129, 384, 96)])
def test_both_gemm_libraries(by_onednn, shape, monkeypatch):
    if by_onednn and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(_gemm, "_mkl_lacks_avx512", lambda: by_onednn)
    rows, inner, columns = shape
    a, b, bias, addend = (
        torch.randn(rows, inner),
        torch.randn(inner, columns),
        torch.randn(columns),
        torch.randn(rows, columns),
    )
    truth = a.double() @ b.double()
    for name, actual, plain, wanted in (
        ("product", _gemm.matmul(a, b), a @ b, truth),
        ("transposed", _gemm.matmul(a.t().contiguous().t(), b.t().contiguous().t()), a @ b, truth),
        ("bias", _gemm.matmul(a, b, bias), torch.addmm(bias, a, b), truth + bias.double()),
        ("add", _gemm.matmul_add(a, b, addend.clone()), torch.addmm(addend, a, b), truth + addend.double()),
    ):
        assert_close_to_truth("gemm", name, actual, plain, wanted)


def test_strided_and_expanded_inputs():
    x, weight = torch.randn(6, 16)[:, ::2], torch.randn(1, 8).expand(5, 8)
    torch.testing.assert_close(ops.linear(x, weight), F.linear(x, weight))
    dy = torch.ones(()).expand(6, 5)
    x = x.clone().requires_grad_()
    ops.linear(x, weight).backward(dy)
    torch.testing.assert_close(x.grad, dy @ weight)


def test_a_tied_transposed_weight():
    table = torch.randn(8, 5, requires_grad=True)
    x, dy = torch.randn(6, 8), torch.randn(6, 5)
    (actual,) = torch.autograd.grad(ops.linear(x, table.t()), table, dy)
    torch.testing.assert_close(actual, x.t() @ dy)


def test_infinities_and_nan_pass_through():
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    x[0, 1], x[2, 3] = float("inf"), float("nan")
    torch.testing.assert_close(ops.linear(x, weight), F.linear(x, weight), equal_nan=True)


@parametrize_wants("x", "weight", "bias")
def test_only_wanted_gradients_are_computed(wants):
    inputs = _inputs(6, 8, 5)
    expected = gradients(_torch, inputs, torch.ones(6, 5))
    given = [t.clone().requires_grad_(name in wants) for name, t in inputs.items()]
    with mock.patch.object(aten, "linear_bwd", wraps=aten.linear_bwd) as backward:
        y = _torch(*given)
        if not wants:
            assert not y.requires_grad
            return
        y.backward(torch.ones(6, 5))
    a, _, asked = backward.call_args.args
    assert asked == wants
    assert (a.x is None) == ("weight" not in wants)
    for name, t in zip(inputs, given, strict=True):
        assert torch.equal(t.grad, expected[f"d{name}"]) if name in wants else t.grad is None


def test_without_bias_no_sum_is_computed():
    x, weight, _ = leaves(_inputs(6, 8, 5))
    with mock.patch.object(aten, "linear_bwd", wraps=aten.linear_bwd) as backward:
        ops.linear(x, weight, backend="torch").sum().backward()
    assert backward.call_args.args[-1] == {"x", "weight"}


def test_what_is_saved():
    x, weight, bias = leaves(_inputs(6, 8, 5))
    addresses = {t.data_ptr() for t in saved(lambda: ops.linear(x, weight, bias))}
    assert addresses == {x.data_ptr(), weight.data_ptr()}
    frozen = weight.detach()
    assert {t.data_ptr() for t in saved(lambda: ops.linear(x, frozen, bias))} == {frozen.data_ptr()}
    with torch.no_grad():
        assert not saved(lambda: ops.linear(x, weight, bias))


@pytest.mark.parametrize("compiles", [False, True])
def test_autocast(compiles):
    assert_autocast_agrees("linear", _torch, _plain, _inputs(33, 24, 40), compiles)


def test_autocast_of_other_dtypes():
    x, weight, bias = _inputs(6, 8, 5).values()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (
            (x.half(), weight.half(), bias.half()),
            (x, weight.bfloat16(), bias),
            (x.bfloat16(), weight, bias),
        ):
            assert ops.linear(*given).dtype == torch.bfloat16
        double = [t.double() for t in (x, weight, bias)]
        assert torch.equal(ops.linear(*double), F.linear(*double))
    # A backward within the context, whose operands autocast would round again.
    x, weight, bias = leaves(_inputs(6, 8, 5, torch.float64))
    y = ops.linear(x, weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, torch.ones_like(y) @ weight.detach())


def test_reference_is_wide_under_autocast():
    x, weight, bias = _inputs(6, 64, 5).values()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = _reference(x, weight, bias)
    assert torch.equal(y, F.linear(x.bfloat16().float(), weight, bias).bfloat16())


def test_checkpointing():
    assert_checkpoints(_torch, _inputs(6, 8, 5), torch.randn(6, 5))


def test_threads():
    inputs, dy = _inputs(64, 48, 40), torch.randn(64, 40)
    expected, results = gradients(_torch, inputs, dy), {}

    def run(index):
        results[index] = gradients(_torch, inputs, dy)

    threads = [Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[i][name], expected[name]) for i in range(4) for name in expected)


def test_second_derivatives_are_refused_by_name():
    x, weight, bias = leaves(_inputs(3, 4, 5))
    (dx,) = torch.autograd.grad(ops.linear(x, weight, bias).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_bwd: second derivatives are not implemented"):
        dx.sum().backward()


def test_gradcheck_and_opcheck():
    x, weight, bias = leaves(_inputs(3, 4, 5, torch.float64))
    assert torch.autograd.gradcheck(ops.linear, (x, weight, bias))
    torch.library.opcheck(torch.ops.bert_fast.linear_fwd, (x, weight, bias, "auto"))


X, W, B = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(5)
BAD = {
    "rank": ((X[None], W), ValueError, r"x: expected shape \[T, K\], got \[1, 2, 4\]"),
    "width": ((X, W[:, :3]), ValueError, r"weight: expected shape \[N, 4\], got \[5, 3\]"),
    "bias": ((X, W, B[:4]), ValueError, r"bias: expected shape \[5\], got \[4\]"),
    "no tensor": (([[1.0]], W), TypeError, "x: expected a Tensor, got list"),
    "weight no tensor": ((X, None), TypeError, "weight: expected a Tensor, got NoneType"),
    "integers": ((X.long(), W), TypeError, "x: expected a floating-point dtype, got int64"),
    "float8": ((X.to(torch.float8_e4m3fn), W), TypeError, "x: expected dtype float32 or .*, got float8_e4m3fn"),
    "half weight": ((X, W.half()), TypeError, r"weight: expected dtype float32 \(that of x\), got float16"),
    "other half": (
        (X.half(), W.bfloat16()),
        TypeError,
        r"weight: expected dtype float16 \(that of x\) or float32, got b",
    ),
    "double x": ((X.double(), W), TypeError, r"weight: expected dtype float64 \(that of x\), got float32"),
    "bias dtype": ((X.half(), W, B.half()), TypeError, r"bias: expected dtype float32 \(that of weight\), got float16"),
    "weight device": ((X, W.to("meta")), ValueError, r"weight: expected device cpu \(that of x\), got meta"),
    "bias device": ((X, W, B.to("meta")), ValueError, r"bias: expected device cpu \(that of x\), got meta"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message):
        ops.linear(*arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_lies_between_rows_is_not_read(dtype):
    """NaN there came out as NaN of PyTorch's products in half precision, on some processors."""

    def spread(t):
        return F.pad(t, (0, -t.shape[1] % 8), value=float("nan"))[:, : t.shape[1]]

    x, weight, dy = (torch.randn(*shape).to(dtype) for shape in ((20, 36), (27, 36), (20, 27)))
    results = []
    for one in (lambda t: t, spread):
        given = [one(t).detach().requires_grad_() for t in (x, weight)]
        y = ops.linear(*given, backend="torch")
        results.append([y, *torch.autograd.grad(y, given, one(dy))])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)
