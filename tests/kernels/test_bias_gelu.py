"""The Triton kernels of bias_gelu, in the interpreter, against the fp64 reference; numbers: test_activations.py."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference import bias_gelu as reference
from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.tolerances import RELATIVE, SHORT_FORM_UNITS
from bert_fast.testing.traffic import traffic
from bert_fast.torch import bias_gelu as aten

pytestmark = pytest.mark.interpreter

ACTIVATIONS = ["gelu", "gelu_new", "relu", "silu", "tanh"]
Inputs = tuple[Tensor, Tensor | None, Tensor]  # x, bias, dy


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve("bias_gelu", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def make_inputs(
    num_tokens: int,
    num_cols: int,
    dtype: torch.dtype = torch.float32,
    *,
    has_bias: bool = True,
    bias_dtype: torch.dtype | None = None,
    scale: float = 2.0,
) -> Inputs:
    x, dy = torch.randn(2, num_tokens, num_cols).unbind()
    bias = torch.randn(num_cols).to(bias_dtype or dtype) if has_bias else None
    return (x * scale).to(dtype), bias, dy.to(dtype)


def run(family, inputs: Inputs, hidden_act: str = "gelu") -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    x, bias, dy = inputs
    a = BiasGelu(x, bias, hidden_act)
    made = family.bias_gelu_bwd(a, dy)
    assert made.keys() == ({"x"} if bias is None else {"x", "bias"})
    return {"y": family.bias_gelu_fwd(a)} | {f"d{name}": gradient for name, gradient in made.items()}


def check(kernels, inputs: Inputs, hidden_act: str = "gelu") -> None:  # type: ignore[no-untyped-def]
    """Compares every output with the fp64 reference on the same rounded inputs; inputs must stay as they were."""
    before = [None if t is None else t.clone() for t in inputs]
    truth = run(reference, tuple(None if t is None else t.double() for t in inputs), hidden_act)
    plain = run(aten, inputs, hidden_act)
    for name, actual in run(kernels, inputs, hidden_act).items():
        output = "dbias_of_half" if name == "dbias" and actual.dtype != inputs[0].dtype else name
        assert_close_to_truth("bias_gelu", output, actual, plain[name], truth[name])
        assert actual.is_contiguous(), name
    assert all(t is None or torch.equal(t, copy) for t, copy in zip(inputs, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_cols", [1, 8, 13, 100, 128, 384, 768, 1000, 1001, 1536, 3072])
def test_widths(kernels, num_cols: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(5, num_cols, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_cols", [3, 33, 511, 513, 2731, 4096, 8192, 8193, 20001])
def test_more_widths(kernels, num_cols: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(3, num_cols, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 17, 250])
def test_numbers_of_tokens(kernels, num_tokens: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(num_tokens, 136, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
def test_activations(kernels, hidden_act: str, has_bias: bool, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(7, 40, dtype, has_bias=has_bias), hidden_act)


def test_synonyms(kernels) -> None:  # type: ignore[no-untyped-def]
    inputs = make_inputs(3, 24)
    for one, other in (("gelu_new", "gelu_pytorch_tanh"), ("silu", "swish")):
        first, second = run(kernels, inputs, one), run(kernels, inputs, other)
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new"])
def test_half_precision_with_fp32_bias(kernels, hidden_act: str) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(5, 40, torch.float16, bias_dtype=torch.float32), hidden_act)


@pytest.mark.parametrize("scale", [1e-3, 30.0, 3e3])
@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
def test_small_and_large_numbers(kernels, hidden_act: str, scale: float) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(5, 40, torch.float16, scale=scale), hidden_act)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_number_spoils_its_element_and_its_column(kernels) -> None:  # type: ignore[no-untyped-def]
    x, bias, dy = make_inputs(9, 40)
    x[4, 7] = float("nan")
    outputs = run(kernels, (x, bias, dy))
    bad = torch.zeros(9, 40, dtype=torch.bool)
    bad[4, 7] = True
    assert torch.equal(outputs["y"].isnan(), bad) and torch.equal(outputs["dx"].isnan(), bad)
    assert torch.equal(outputs["dbias"].isnan(), bad.any(0))


@pytest.mark.parametrize("num_cols", [40, 203])
@pytest.mark.parametrize("layout", ["row-strided", "padded", "transposed", "expanded"])
def test_strides(kernels, layout: str, num_cols: int) -> None:  # type: ignore[no-untyped-def]
    x, bias, dy = make_inputs(6, num_cols, torch.float16)

    def relaid(t: Tensor) -> Tensor:
        if layout == "row-strided":
            return torch.cat([t, t + 1], dim=1)[:, :num_cols]
        if layout == "padded":  # rows start at whole vectors, but are no whole number of them
            return torch.nn.functional.pad(t, (0, -num_cols % 8), value=float("nan"))[:, :num_cols]
        if layout == "transposed":
            return t.t().contiguous().t()
        return t[:1].expand_as(t)

    check(kernels, (relaid(x), bias.repeat_interleave(2)[::2], relaid(dy)))


def test_runs_repeat_bit_for_bit(kernels) -> None:  # type: ignore[no-untyped-def]
    inputs = make_inputs(99, 1100, torch.float16)
    first, second = run(kernels, inputs), run(kernels, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bf16_stays_within_a_unit_of_the_reference(kernels) -> None:  # type: ignore[no-untyped-def]
    x, bias, dy = make_inputs(5, 96, torch.bfloat16)
    actual, wide = run(kernels, (x, bias, dy)), run(reference, (x.float(), bias.float(), dy.float()))
    allowed = RELATIVE["bf16_stored_by_interpreter"] * (1 + SHORT_FORM_UNITS[torch.bfloat16])
    for name in ("y", "dx"):
        assert ((actual[name].float() - wide[name]).abs() <= wide[name].abs() * allowed).all(), name


def test_offsets_beyond_two_to_the_31(kernels, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The second row of every input lies 2^31 + 8 elements behind the first, in a sparse file that takes no space."""
    num_cols, stride = 16, 2**31 + 8
    x, bias, dy = make_inputs(2, num_cols, torch.float16)

    def far_apart(name: str, t: Tensor) -> Tensor:
        storage = torch.from_file(str(tmp_path / name), shared=True, size=stride + num_cols, dtype=t.dtype)
        return storage.as_strided((2, num_cols), (stride, 1)).copy_(t)

    far, near = run(kernels, (far_apart("x", x), bias, far_apart("dy", dy))), run(kernels, (x, bias, dy))
    assert all(torch.equal(far[name], near[name]) for name in near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_width_has_a_configuration(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    for num_cols in (*range(1, 5000), 30522, 250002):
        config = kernels.launch_config(num_cols, dtype)
        for size in (config.cols, config.forward_rows, config.backward_rows):
            assert size > 0 and size & (size - 1) == 0
        padding = -num_cols % config.cols
        assert num_cols < 128 or padding <= max(127, num_cols // 16)


@pytest.mark.parametrize("has_bias", [False, True])
def test_bytes_are_those_of_the_docstring(kernels, has_bias: bool) -> None:  # type: ignore[no-untyped-def]
    """Every element of a [T, N] tensor is touched once, nothing but bias and partial sums besides."""
    x, bias, dy = make_inputs(37, 136, torch.float16, has_bias=has_bias)
    a = BiasGelu(x, bias, "gelu")
    with traffic() as forward:
        y = kernels.bias_gelu_fwd(a)
    assert forward.times_loaded(x) == {1} and forward.times_stored(y) == {1}
    assert len(forward.loads) == x.numel() + 136 * has_bias
    assert forward.stored_bytes == y.nbytes

    with traffic() as backward:
        made = kernels.bias_gelu_bwd(a, dy)
    dx, dbias = made["x"], made.get("bias")
    assert backward.times_loaded(x) == backward.times_loaded(dy) == backward.times_stored(dx) == {1}
    if not has_bias:
        assert len(backward.loads) == 2 * x.numel() and backward.stored_bytes == dx.nbytes
        return
    assert backward.times_stored(dbias) == {1}
    partial_bytes = backward.stored_bytes - dx.nbytes - dbias.nbytes
    assert partial_bytes % (4 * 136) == 0 and partial_bytes > 0
    assert len(backward.loads) == 2 * x.numel() + 136 + partial_bytes // 4
