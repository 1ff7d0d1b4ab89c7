"""The Triton kernels of LayerNorm, in the interpreter, against the fp64 reference."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference import layer_norm as reference
from bert_fast.reference.layer_norm import LayerNorm
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import traffic

pytestmark = pytest.mark.interpreter

NAMES = ("y", "mean", "rstd", "dx", "dweight", "dbias")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # x, weight, bias, dy


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve("layer_norm", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def make_inputs(
    num_tokens: int, hidden_size: int, dtype: torch.dtype = torch.float32, parameters: torch.dtype | None = None
) -> Inputs:
    x, dy = torch.randn(2, num_tokens, hidden_size).to(dtype).unbind()
    weight, bias = torch.randn(2, hidden_size).to(parameters or dtype).unbind()
    return x, weight, bias, dy


def run(family, inputs: Inputs, eps: float = 1e-12) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    x, weight, bias, dy = inputs
    y, mean, rstd = family.layer_norm_fwd(LayerNorm(x, weight, bias, eps))
    made = family.layer_norm_bwd(LayerNorm(x, weight, None, None), dy, mean, rstd)
    return y, mean, rstd, made["x"], made["weight"], made["bias"]


def run_plain(inputs: Inputs, eps: float) -> tuple[Tensor, ...]:
    """The same from PyTorch's operator and autograd."""
    x, weight, bias = (t.clone().requires_grad_() for t in inputs[:3])
    y = torch.nn.functional.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, eps).to(x.dtype)
    grads = torch.autograd.grad(y, (x, weight, bias), inputs[3])
    return y.detach(), x.detach().float().mean(1), (x.detach().float().var(1, unbiased=False) + eps).rsqrt(), *grads


def check(kernels, inputs: Inputs, eps: float = 1e-12) -> None:  # type: ignore[no-untyped-def]
    """Compares every output with the fp64 reference on the same rounded inputs; inputs must stay as they were."""
    before = [t.clone() for t in inputs]
    truths = run(reference, tuple(t.double() for t in inputs), eps)
    for name, actual, plain, truth in zip(
        NAMES, run(kernels, inputs, eps), run_plain(inputs, eps), truths, strict=True
    ):
        assert_close_to_truth("layer_norm", name, actual, plain, truth)
        assert actual.is_contiguous(), name
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden_size", [5, 8, 13, 96, 312, 384, 768, 1000, 1024])
def test_widths(kernels, hidden_size: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(5, hidden_size, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden_size", "dtype"),
    [(33, torch.float16), (1500, torch.float32), (4096, torch.float16), (8191, torch.float16), (8192, torch.float32)],
)
def test_more_widths(kernels, hidden_size: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(3, hidden_size, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 17, 64])
def test_numbers_of_tokens(kernels, num_tokens: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(num_tokens, 96, dtype))


def test_half_precision_with_fp32_parameters(kernels) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(5, 40, torch.float16, parameters=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_far_from_zero(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """An offset of -20 with a spread of 0.1 defeats variances computed as E[x^2] - E[x]^2."""
    x, weight, bias, dy = make_inputs(5, 96)
    check(kernels, tuple(t.to(dtype) for t in (x * 0.1 - 20, weight, bias, dy)), 1e-5)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e15), (torch.float16, 1e4)])
def test_huge_values(kernels, dtype: torch.dtype, scale: float) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, dy = make_inputs(5, 96, dtype)
    inputs = ((x.float() * scale).to(dtype), weight, bias, dy)
    actual, expected = run(kernels, inputs)[0], run(reference, inputs)[0]
    assert_close_to_truth("layer_norm", "y", actual, expected, expected.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_without_variance(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """One column, or equal ones: y is bias exactly and rstd 1e6; of one column nothing flows back."""
    _, weight, bias, dy = make_inputs(3, 40, dtype)
    y, _, rstd, *_ = run(kernels, (torch.full((3, 40), 2.0, dtype=dtype), weight, bias, dy))
    assert torch.equal(y, bias.expand_as(y)) and (rstd > 9e5).all()
    x, weight, bias, dy = make_inputs(5, 1, dtype)
    y, mean, _, dx, *_ = run(kernels, (x, weight, bias, dy))
    assert torch.equal(y, bias.expand_as(y)) and torch.isfinite(mean).all() and not dx.any()


def test_one_bad_row_spoils_no_other(kernels) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, dy = make_inputs(9, 40)
    x[4, 7] = float("inf")
    y, mean, rstd, dx, *_ = run(kernels, (x, weight, bias, dy))
    good = torch.arange(9) != 4
    for t in (y, mean[:, None], rstd[:, None], dx):
        assert torch.equal(t.isfinite().all(1), good) or t is rstd


@pytest.mark.parametrize("layout", ["row-strided", "transposed", "expanded"])
def test_strides(kernels, layout: str) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, dy = make_inputs(6, 40)

    def relaid(t: Tensor) -> Tensor:
        if layout == "row-strided":
            return torch.cat([t, t + 1], dim=1)[:, : t.shape[1]]
        if layout == "transposed":
            return t.t().contiguous().t()
        return t[:1].expand_as(t)

    check(kernels, (relaid(x), weight.repeat_interleave(2)[::2], bias.repeat_interleave(3)[::3], relaid(dy)))


def test_runs_repeat_bit_for_bit(kernels) -> None:  # type: ignore[no-untyped-def]
    inputs = make_inputs(33, 96, torch.float16)
    assert all(map(torch.equal, run(kernels, inputs), run(kernels, inputs)))


def test_bf16_stays_within_a_unit_of_the_reference(kernels) -> None:  # type: ignore[no-untyped-def]
    inputs = make_inputs(5, 96, torch.bfloat16)
    wide = run(reference, tuple(t.float() for t in inputs))
    actual = run(kernels, inputs)
    for index in (0, 3):  # y, dx
        error = (actual[index].float() - wide[index]).abs()
        assert (error <= wide[index].abs() * RELATIVE["bf16_stored_by_interpreter"]).all(), NAMES[index]


def test_offsets_beyond_two_to_the_31(kernels, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The second row of every input lies 2^31 + 8 elements behind the first, in a sparse file that takes no space."""
    hidden_size, stride = 16, 2**31 + 8
    x, weight, bias, dy = make_inputs(2, hidden_size, torch.float16)

    def far_apart(name: str, t: Tensor) -> Tensor:
        storage = torch.from_file(str(tmp_path / name), shared=True, size=stride + hidden_size, dtype=t.dtype)
        return storage.as_strided((2, hidden_size), (stride, 1)).copy_(t)

    far = run(kernels, (far_apart("x", x), weight, bias, far_apart("dy", dy)))
    assert all(map(torch.equal, far, run(kernels, (x, weight, bias, dy))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_width_has_a_configuration(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    for hidden_size in range(1, 8193):
        config = kernels.launch_config(hidden_size, dtype)
        for tile in (config.forward, config.backward):
            assert tile.chunks * tile.chunk_cols >= hidden_size
            assert all(n & (n - 1) == 0 for n in (tile.chunks, tile.rows, tile.chunk_cols, tile.num_warps))
        assert config.backward_programs_per_multiprocessor * config.backward.num_warps * 32 <= 1024


def test_bytes_are_those_of_the_docstring(kernels) -> None:  # type: ignore[no-untyped-def]
    """Every element of a [T, H] tensor is touched once, nothing but parameters and partial sums besides."""
    num_tokens, hidden_size = 13, 40
    x, weight, bias, dy = make_inputs(num_tokens, hidden_size, torch.float16)
    with traffic() as forward:
        y, mean, rstd = kernels.layer_norm_fwd(LayerNorm(x, weight, bias, 1e-12))
    assert forward.times_loaded(x) == {1}
    assert all(forward.times_stored(t) == {1} for t in (y, mean, rstd))
    assert len(forward.loads) == x.numel() + 2 * hidden_size
    assert forward.stored_bytes == num_tokens * (2 * hidden_size + 8)

    with traffic() as backward:
        made = kernels.layer_norm_bwd(LayerNorm(x, weight, None, None), dy, mean, rstd)
    dx, dweight, dbias = made["x"], made["weight"], made["bias"]
    assert all(backward.times_loaded(t) == {1} for t in (dy, x, mean, rstd))
    assert all(backward.times_stored(t) == {1} for t in (dx, dweight, dbias))
    partial_bytes = backward.stored_bytes - sum(t.nbytes for t in (dx, dweight, dbias))
    assert partial_bytes % (8 * hidden_size) == 0 and partial_bytes > 0
    assert len(backward.loads) == 2 * x.numel() + 2 * num_tokens + hidden_size + partial_bytes // 4
