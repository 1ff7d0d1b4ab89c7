"""The Triton back-end of linear_gelu, in the interpreter, against the fp64 reference."""

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference import linear_gelu as reference
from bert_fast.reference.linear_gelu import LinearGelu
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import traffic
from bert_fast.torch import linear_gelu as aten
from tests.wants import parametrize_wants

from .linear_inputs import LAYOUTS, Tensors, check, randn, relaid, representable

pytestmark = pytest.mark.interpreter

ACTIVATIONS = ["gelu", "gelu_new", "relu", "silu", "tanh"]
GRADIENTS = ("x", "weight", "bias")


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve("linear_gelu", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def make_inputs(
    tokens: int, width_in: int, width_out: int, dtype: torch.dtype, *, weight_dtype: torch.dtype | None = None,
    has_bias: bool = True, scale: float = 1.0,
) -> Tensors:  # fmt: skip
    return {
        "x": randn(tokens, width_in, dtype=dtype),
        "weight": randn(width_out, width_in, dtype=weight_dtype or dtype, scale=scale / max(1, width_in) ** 0.5),
        "bias": randn(width_out, dtype=weight_dtype or dtype, scale=scale) if has_bias else None,
        "dy": randn(tokens, width_out, dtype=dtype),
    }


def run(family, inputs: Tensors, hidden_act: str = "gelu", save_pre: bool = True) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    x, weight, bias, dy = inputs.values()
    a = LinearGelu(x, weight, bias, hidden_act, save_pre)
    y, pre = family.linear_gelu_fwd(a)
    assert (pre is not None) == save_pre
    wants = {name for name in GRADIENTS if inputs[name] is not None}
    made = family.linear_gelu_bwd(a, dy, pre, wants)
    assert made.keys() == wants
    outputs = {"y": y} | {f"d{name}": gradient for name, gradient in made.items()}
    return outputs | ({"pre": pre} if save_pre else {})


def compare(kernels, inputs: Tensors, *flags) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    return check("linear_gelu", lambda family, given: run(family, given, *flags), kernels, aten, reference, inputs)


@pytest.mark.parametrize("save_pre", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (0, 8, 16), (5, 0, 7), (1, 65, 3), (7, 13, 31), (63, 64, 65), (37, 257, 1)]
)
def test_sizes(kernels, shape, dtype, save_pre):  # type: ignore[no-untyped-def]
    compare(kernels, make_inputs(*shape, dtype), "gelu", save_pre)


@pytest.mark.parametrize("save_pre", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
def test_activations(kernels, hidden_act, dtype, save_pre):  # type: ignore[no-untyped-def]
    compare(kernels, make_inputs(9, 20, 24, dtype, scale=2.0), hidden_act, save_pre)


@pytest.mark.parametrize("save_pre", [True, False])
def test_without_bias(kernels, save_pre):  # type: ignore[no-untyped-def]
    compare(kernels, make_inputs(9, 20, 24, torch.float16, has_bias=False), "gelu", save_pre)


def test_synonyms(kernels):  # type: ignore[no-untyped-def]
    inputs = make_inputs(3, 24, 8, torch.float32)
    for one, other in (("gelu_new", "gelu_pytorch_tanh"), ("silu", "swish")):
        first, second = run(kernels, inputs, one), run(kernels, inputs, other)
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("save_pre", [True, False])
def test_fp32_parameters_beside_half_precision(kernels, save_pre):  # type: ignore[no-untyped-def]
    inputs = make_inputs(33, 40, 24, torch.float16, weight_dtype=torch.float32)
    outputs = compare(kernels, inputs, "gelu", save_pre)
    for name in ("dweight", "dbias"):
        assert outputs[name].dtype == torch.float32
        assert not representable(outputs[name], torch.float16), f"{name}: rounded to half precision on the way"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("save_pre", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(kernels, layout, save_pre, dtype):  # type: ignore[no-untyped-def]
    inputs = make_inputs(20, 36, 27, dtype)
    strided = {name: t if name == "bias" else relaid(t, layout) for name, t in inputs.items()}
    strided["bias"] = inputs["bias"].repeat_interleave(2)[::2]
    compare(kernels, strided, "gelu", save_pre)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scale", [1e-3, 30.0, 3e3])
@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
def test_small_and_large_numbers(kernels, hidden_act, scale):  # type: ignore[no-untyped-def]
    compare(kernels, make_inputs(9, 20, 24, torch.float16, scale=scale), hidden_act)


@pytest.mark.parametrize("save_pre", [True, False])
@parametrize_wants(*GRADIENTS)
def test_what_is_not_wanted_is_not_there(kernels, wants, save_pre):  # type: ignore[no-untyped-def]
    x, weight, bias, dy = make_inputs(9, 12, 10, torch.float32).values()
    a = LinearGelu(x, weight, bias, "gelu", save_pre)
    _, pre = kernels.linear_gelu_fwd(a)
    whole = kernels.linear_gelu_bwd(a, dy, pre, {*GRADIENTS})
    kept = a if "weight" in wants or not save_pre else a._replace(x=None)
    part = kernels.linear_gelu_bwd(kept, dy, pre, wants)
    assert part.keys() == wants
    assert all(torch.equal(part[name], whole[name]) for name in wants)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("save_pre", [True, False])
def test_a_bad_number_spoils_what_it_belongs_to(kernels, save_pre):  # type: ignore[no-untyped-def]
    inputs = make_inputs(70, 40, 70, torch.float16)
    inputs["dy"][3, 68] = float("nan")
    outputs = run(kernels, inputs, "gelu", save_pre)
    rows, columns = torch.arange(70)[:, None], torch.arange(70)[None, :]
    assert outputs["y"].isfinite().all()
    assert torch.equal(outputs["dx"].isnan(), (rows == 3).expand(70, 40))
    assert torch.equal(outputs["dweight"].isnan(), (rows == 68).expand(70, 40))
    assert torch.equal(outputs["dbias"].isnan(), columns[0] == 68)


def test_runs_repeat_bit_for_bit(kernels):  # type: ignore[no-untyped-def]
    inputs = make_inputs(99, 140, 70, torch.float16)
    first, second = run(kernels, inputs), run(kernels, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("save_pre", [True, False])
def test_bytes_are_those_of_the_docstring(kernels, save_pre):  # type: ignore[no-untyped-def]
    x, weight, bias, dy = make_inputs(70, 40, 90, torch.float16).values()
    a = LinearGelu(x, weight, bias, "gelu", save_pre)
    slack = 1 + RELATIVE["traffic_above_floor"]
    with traffic() as forward:
        y, pre = kernels.linear_gelu_fwd(a)
    assert forward.times_stored(y) == {1} and forward.stored_bytes == y.nbytes * (1 + save_pre)
    assert forward.unique_loaded_bytes(x, weight, bias) == x.nbytes + weight.nbytes + bias.nbytes
    assert forward.unique_bytes <= (x.nbytes + weight.nbytes + bias.nbytes + forward.stored_bytes) * slack

    # dpre alone: what the products for dx and dweight move is the affair of linear
    with traffic() as backward:
        kernels.linear_gelu_bwd(a, dy, pre, {"bias"})
    partial_bytes = backward.stored_bytes - y.nbytes - bias.nbytes
    assert 0 < partial_bytes < y.nbytes and partial_bytes % (4 * 90) == 0
    assert backward.unique_loaded_bytes(dy) == dy.nbytes
    if save_pre:
        assert backward.times_loaded(dy) == backward.times_loaded(pre) == {1}
