"""The Triton back-end of linear, in the interpreter, against the fp64 reference."""

import pytest
import torch
from torch import Tensor

from bert_fast import backend, ops, use_backend
from bert_fast.reference import linear as reference
from bert_fast.reference.linear import Linear
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import traffic
from bert_fast.torch import linear as aten
from tests.wants import parametrize_wants

from .linear_inputs import LAYOUTS, Tensors, check, randn, relaid, representable

pytestmark = pytest.mark.interpreter

GRADIENTS = ("x", "weight", "bias")


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve("linear", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def make_inputs(
    tokens: int, width_in: int, width_out: int, dtype: torch.dtype, *, weight_dtype: torch.dtype | None = None,
    has_bias: bool = True, scale: float = 1.0,
) -> Tensors:  # fmt: skip
    return {
        "x": randn(tokens, width_in, dtype=dtype, scale=scale),
        "weight": randn(width_out, width_in, dtype=weight_dtype or dtype),
        "bias": randn(width_out, dtype=weight_dtype or dtype, scale=scale) if has_bias else None,
        "dy": randn(tokens, width_out, dtype=dtype),
    }


def run(family, inputs: Tensors) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    x, weight, bias, dy = inputs.values()
    y = family.linear_fwd(Linear(x, weight, bias))
    wants = {name for name in GRADIENTS if inputs[name] is not None}
    made = family.linear_bwd(Linear(x, weight, None), dy, wants)
    assert made.keys() == wants
    return {"y": y} | {f"d{name}": gradient for name, gradient in made.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (0, 8, 16), (5, 0, 7), (1, 65, 3), (7, 13, 31), (63, 64, 65), (128, 130, 40), (37, 257, 1)]
)
def test_sizes(kernels, shape, dtype):  # type: ignore[no-untyped-def]
    check("linear", run, kernels, aten, reference, make_inputs(*shape, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_without_bias(kernels, dtype):  # type: ignore[no-untyped-def]
    check("linear", run, kernels, aten, reference, make_inputs(9, 20, 24, dtype, has_bias=False))


def test_fp32_parameters_beside_half_precision(kernels):  # type: ignore[no-untyped-def]
    inputs = make_inputs(33, 40, 24, torch.float16, weight_dtype=torch.float32)
    outputs = check("linear", run, kernels, aten, reference, inputs)
    assert [outputs[name].dtype for name in ("dweight", "dbias")] == [torch.float32] * 2
    assert not representable(outputs["dweight"], torch.float16), "rounded to half precision on the way"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(kernels, layout, dtype):  # type: ignore[no-untyped-def]
    inputs = make_inputs(20, 36, 27, dtype)
    strided = {name: t if name == "bias" else relaid(t, layout) for name, t in inputs.items()}
    strided["bias"] = inputs["bias"].repeat_interleave(2)[::2]
    check("linear", run, kernels, aten, reference, strided)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_small_and_large_numbers(kernels, scale):  # type: ignore[no-untyped-def]
    check("linear", run, kernels, aten, reference, make_inputs(20, 36, 27, torch.float16, scale=scale))


@parametrize_wants(*GRADIENTS)
def test_what_is_not_wanted_is_not_there(kernels, wants):  # type: ignore[no-untyped-def]
    x, weight, _, dy = make_inputs(9, 12, 10, torch.float32).values()
    whole = kernels.linear_bwd(Linear(x, weight, None), dy, {*GRADIENTS})
    part = kernels.linear_bwd(Linear(x if "weight" in wants else None, weight, None), dy, wants)
    assert part.keys() == wants
    assert all(torch.equal(part[name], whole[name]) for name in wants)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_number_spoils_what_it_belongs_to(kernels):  # type: ignore[no-untyped-def]
    inputs = make_inputs(70, 40, 70, torch.float16)
    inputs["x"][66, 7], inputs["dy"][3, 68] = float("nan"), float("inf")
    outputs = run(kernels, inputs)
    rows, columns = torch.arange(70)[:, None], torch.arange(70)[None, :]
    assert torch.equal(outputs["y"].isnan(), (rows == 66).expand(70, 70))
    assert torch.equal(~outputs["dx"].isfinite(), (rows == 3).expand(70, 40))
    assert torch.equal(~outputs["dweight"].isfinite(), (rows == 68) | (columns[:, :40] == 7))
    assert torch.equal(outputs["dbias"].isinf(), columns[0] == 68)


def test_runs_repeat_bit_for_bit(kernels):  # type: ignore[no-untyped-def]
    inputs = make_inputs(99, 140, 70, torch.float16)
    first, second = run(kernels, inputs), run(kernels, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bytes_are_those_of_the_docstring(kernels):  # type: ignore[no-untyped-def]
    """Operands are read, each address at least once, results written once; nothing else."""
    x, weight, bias, dy = make_inputs(70, 40, 90, torch.float16).values()
    with traffic() as forward:
        y = kernels.linear_fwd(Linear(x, weight, bias))
    assert forward.times_stored(y) == {1} and forward.stored_bytes == y.nbytes
    assert forward.unique_bytes <= (x.nbytes + weight.nbytes + bias.nbytes + y.nbytes) * (
        1 + RELATIVE["traffic_above_floor"]
    )
    with traffic() as backward:
        made = kernels.linear_bwd(Linear(x, weight, None), dy, {"x", "weight"})
    assert backward.times_stored(made["x"]) == backward.times_stored(made["weight"]) == {1}
    assert backward.stored_bytes == made["x"].nbytes + made["weight"].nbytes


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_a_weight_that_was_cast_after_forward_raises(name: str) -> None:
    x, up, down = (torch.randn(shape, requires_grad=True) for shape in ((5, 8), (12, 8), (8, 12)))
    with use_backend("triton"):
        y = ops.linear(x, up) if name == "linear" else ops.mlp(x, up, None, down, None)
        weight = up if name == "linear" else down
        weight.data = weight.data.bfloat16()
        with pytest.raises(
            TypeError, match=r"weight: expected dtype torch\.float32 .* in backward, got torch\.bfloat16"
        ):
            y.sum().backward()
