"""The Triton back-end of mlp, in the interpreter, against the fp64 reference."""

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference import mlp as reference
from bert_fast.reference.mlp import Mlp
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import traffic
from bert_fast.torch import mlp as aten
from tests.wants import parametrize_wants

from .linear_inputs import LAYOUTS, Tensors, check, randn, relaid, representable

pytestmark = pytest.mark.interpreter

ACTIVATIONS = ["gelu", "gelu_new", "relu", "silu", "tanh"]
GRADIENTS = ("x", "up_weight", "up_bias", "down_weight", "down_bias")


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve("mlp", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def make_inputs(
    tokens: int, hidden: int, intermediate: int, dtype: torch.dtype, *, weight_dtype: torch.dtype | None = None,
    has_bias: bool = True, scale: float = 1.0,
) -> Tensors:  # fmt: skip
    wide = weight_dtype or dtype
    return {
        "x": randn(tokens, hidden, dtype=dtype),
        "up_weight": randn(intermediate, hidden, dtype=wide, scale=scale / max(1, hidden) ** 0.5),
        "up_bias": randn(intermediate, dtype=wide, scale=scale) if has_bias else None,
        "down_weight": randn(hidden, intermediate, dtype=wide, scale=max(1, intermediate) ** -0.5),
        "down_bias": randn(hidden, dtype=wide) if has_bias else None,
        "dy": randn(tokens, hidden, dtype=dtype),
    }


def run(family, inputs: Tensors, hidden_act: str = "gelu", save_pre: bool = True) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    *tensors, dy = inputs.values()
    a = Mlp(*tensors, hidden_act, save_pre)
    y, pre = family.mlp_fwd(a)
    assert (pre is not None) == save_pre
    wants = {name for name in GRADIENTS if inputs[name] is not None}
    made = family.mlp_bwd(a._replace(down_bias=None), dy, pre, wants)
    assert made.keys() == wants
    outputs = {"y": y} | {f"d{name}": gradient for name, gradient in made.items()}
    return outputs | ({"pre": pre} if save_pre else {})


def compare(kernels, inputs: Tensors, *flags) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    return check("mlp", lambda family, given: run(family, given, *flags), kernels, aten, reference, inputs)


@pytest.mark.parametrize("save_pre", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (0, 8, 16), (5, 3, 0), (1, 65, 3), (7, 13, 31), (63, 64, 65), (70, 40, 129)]
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


@pytest.mark.parametrize("save_pre", [True, False])
def test_fp32_parameters_beside_half_precision(kernels, save_pre):  # type: ignore[no-untyped-def]
    inputs = make_inputs(33, 40, 24, torch.float16, weight_dtype=torch.float32)
    outputs = compare(kernels, inputs, "gelu", save_pre)
    for name in GRADIENTS[1:]:
        assert outputs[f"d{name}"].dtype == torch.float32
        if name != "down_bias":  # a few numbers of half precision can add up to one
            assert not representable(outputs[f"d{name}"], torch.float16), f"d{name}: rounded to half precision"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("save_pre", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(kernels, layout, save_pre, dtype):  # type: ignore[no-untyped-def]
    inputs = make_inputs(20, 36, 27, dtype)
    strided = {name: relaid(t, layout) if t.dim() == 2 else t.repeat_interleave(2)[::2] for name, t in inputs.items()}
    compare(kernels, strided, "gelu", save_pre)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
def test_small_and_large_numbers(kernels, hidden_act, scale):  # type: ignore[no-untyped-def]
    compare(kernels, make_inputs(9, 20, 24, torch.float16, scale=scale), hidden_act)


@pytest.mark.parametrize("save_pre", [True, False])
@parametrize_wants(*GRADIENTS, sizes=(0, 1, 4, 5))
def test_what_is_not_wanted_is_not_there(kernels, wants, save_pre):  # type: ignore[no-untyped-def]
    *tensors, dy = make_inputs(5, 6, 10, torch.float32).values()
    a = Mlp(*tensors, "gelu", save_pre)
    _, pre = kernels.mlp_fwd(a)
    a = a._replace(down_bias=None)
    whole = reference.mlp_bwd(a, dy, pre, {*GRADIENTS})
    needs_x = "up_weight" in wants or (not save_pre and wants - {"down_bias"})
    part = kernels.mlp_bwd(a if needs_x else a._replace(x=None), dy, pre, wants)
    assert part.keys() == wants
    for name in wants:
        torch.testing.assert_close(part[name], whole[name])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("save_pre", [True, False])
def test_a_bad_number_spoils_what_it_belongs_to(kernels, save_pre):  # type: ignore[no-untyped-def]
    inputs = make_inputs(70, 40, 24, torch.float16)
    inputs["x"][66, 7] = float("nan")
    outputs = run(kernels, inputs, "gelu", save_pre)
    spoilt = (torch.arange(70)[:, None] == 66).expand(70, 40)
    assert torch.equal(outputs["y"].isnan(), spoilt) and torch.equal(outputs["dx"].isnan(), spoilt)
    assert all(outputs[f"d{name}"].isnan().all() for name in GRADIENTS[1:4]) and outputs["ddown_bias"].isfinite().all()


def test_runs_repeat_bit_for_bit(kernels):  # type: ignore[no-untyped-def]
    inputs = make_inputs(99, 70, 140, torch.float16)
    first, second = run(kernels, inputs), run(kernels, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bytes_are_those_of_the_docstring(kernels):  # type: ignore[no-untyped-def]
    """Between the products every [T, I] tensor is written once, and nothing else is."""
    x, up_weight, up_bias, down_weight, _, dy = make_inputs(70, 40, 130, torch.float16).values()
    a = Mlp(x, up_weight, up_bias, down_weight, None, "gelu", True)
    with traffic() as forward:
        y, pre = kernels.mlp_fwd(a)
    assert forward.times_stored(y) == forward.times_stored(pre) == {1}
    assert forward.stored_bytes == y.nbytes + 2 * pre.nbytes  # pre and the activation
    read = x.nbytes + up_weight.nbytes + up_bias.nbytes + down_weight.nbytes + pre.nbytes  # the activation, not pre
    assert forward.unique_loaded_bytes(pre) == 0
    assert forward.unique_bytes <= (read + forward.stored_bytes) * (1 + RELATIVE["traffic_above_floor"])

    with traffic() as backward:
        made = kernels.mlp_bwd(a, dy, pre, {"x", "up_weight", "up_bias", "down_weight"})
    assert backward.times_loaded(pre) == {1}  # one epilogue has both of its uses
    results = sum(made[name].nbytes for name in ("x", "up_weight", "down_weight"))
    sums = backward.stored_bytes - results - 2 * pre.nbytes  # beside dpre and the activation
    assert 0 < sums <= 4 * 130 * (70 // 16 + 2), "column sums: fp32, a row for every block of rows, then the totals"
