"""The Triton back-end of gated_mlp, in the interpreter, against the fp64 reference."""

import pytest
import torch
from torch import Tensor, nn

from bert_fast import backend
from bert_fast.reference import gated_mlp as reference
from bert_fast.reference.dropout import keep_mask
from bert_fast.reference.gated_mlp import GatedMlp
from bert_fast.storage import join_memory
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import traffic
from bert_fast.torch import gated_mlp as aten
from tests.wants import parametrize_wants

from .linear_inputs import LAYOUTS, Tensors, check, randn, relaid, representable

pytestmark = pytest.mark.interpreter

GRADIENTS = ("x", "weight", "bias", "down_weight", "down_bias")
SEED = torch.tensor([2**40 + 5])


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve("gated_mlp", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def make_inputs(
    tokens: int, hidden: int, wide: int, dtype: torch.dtype, *, weight_dtype: torch.dtype | None = None,
    has_bias: bool = False, scale: float = 1.0, joins: bool = True,
) -> Tensors:  # fmt: skip
    of_weights = weight_dtype or dtype
    gate, up = (nn.Parameter(randn(wide, hidden, dtype=of_weights, scale=scale * hidden**-0.5)) for _ in range(2))
    if joins:
        join_memory(gate, up)
    return {
        "x": randn(tokens, hidden, dtype=dtype),
        "gate_weight": gate.requires_grad_(False),
        "gate_bias": randn(wide, dtype=of_weights) if has_bias else None,
        "up_weight": up.requires_grad_(False),
        "up_bias": randn(wide, dtype=of_weights) if has_bias else None,
        "down_weight": randn(hidden, wide, dtype=of_weights, scale=wide**-0.5),
        "down_bias": randn(hidden, dtype=of_weights) if has_bias else None,
        "dy": randn(tokens, hidden, dtype=dtype),
    }


def record(tensors: list[Tensor | None], hidden_act: str = "silu", save_pre: bool = True, p: float = 0.0) -> GatedMlp:
    tokens = torch.arange(len(tensors[0]), dtype=torch.int32)  # type: ignore[arg-type]
    return GatedMlp(*tensors, hidden_act, p, SEED, torch.stack((tokens // 4, tokens % 4), 1), 9, save_pre)  # type: ignore[arg-type]


def run(family, inputs: Tensors, *options) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    *tensors, dy = inputs.values()
    a = record(tensors, *options)
    y, pre = family.gated_mlp_fwd(a)
    assert (pre is not None) == a.save_pre
    wants = {name for name in GRADIENTS if not name.endswith("bias") or a.up_bias is not None}
    kept = None if pre is None else pre.clone()
    made = family.gated_mlp_bwd(a._replace(down_bias=None), dy, pre, wants)
    assert made.keys() == wants
    assert pre is None or torch.equal(pre, kept), "what was saved is another backward pass's as well"
    outputs = {"y": y} | {f"d{name}": gradient for name, gradient in made.items()}
    return outputs if pre is None else outputs | {"pre": pre}


def compare(kernels, inputs: Tensors, *options) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    return check("gated_mlp", lambda family, given: run(family, given, *options), kernels, aten, reference, inputs)


@pytest.mark.parametrize(("joins", "save_pre", "p"), [(True, True, 0.0), (False, False, 0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 8, 16), (1, 65, 3), (7, 13, 31), (9, 16, 264), (33, 24, 129)])
def test_sizes(kernels, shape, dtype, joins, save_pre, p):  # type: ignore[no-untyped-def]
    """129 and 264: a row is cut into blocks of 128 columns (fp32) or 256."""
    compare(kernels, make_inputs(*shape, dtype, joins=joins, has_bias=True), "silu", save_pre, p)


def test_no_columns_between_the_products(kernels):  # type: ignore[no-untyped-def]
    inputs = make_inputs(5, 4, 6, torch.float32, has_bias=True)
    none = {name: inputs[name][:0] for name in ("gate_weight", "gate_bias", "up_weight", "up_bias")}  # type: ignore[index]
    outputs = run(kernels, inputs | none | {"down_weight": inputs["down_weight"][:, :0]}, "silu", True, 0.3)  # type: ignore[index]
    assert torch.equal(outputs["y"], inputs["down_bias"].expand(5, 4)) and not outputs["dx"].any()  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "relu", "silu", "tanh"])
def test_activations(kernels, hidden_act, dtype):  # type: ignore[no-untyped-def]
    compare(kernels, make_inputs(9, 20, 24, dtype, scale=2.0), hidden_act, True, 0.1)


@pytest.mark.parametrize("joins", [True, False])
def test_fp32_parameters_beside_half_precision(kernels, joins):  # type: ignore[no-untyped-def]
    inputs = make_inputs(33, 40, 24, torch.float16, weight_dtype=torch.float32, has_bias=True, joins=joins)
    outputs = compare(kernels, inputs, "silu", True, 0.1)
    for name in GRADIENTS[1:]:
        assert outputs[f"d{name}"].dtype == torch.float32
        if not name.endswith("bias"):  # a few numbers of half precision can add up to one
            assert not representable(outputs[f"d{name}"], torch.float16), f"d{name}: rounded to half precision"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(kernels, layout):  # type: ignore[no-untyped-def]
    inputs = make_inputs(12, 20, 27, torch.float16, has_bias=True)
    strided = {name: relaid(t, layout) if t.dim() == 2 else t.repeat_interleave(2)[::2] for name, t in inputs.items()}
    compare(kernels, strided, "gelu", False, 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masks_are_those_of_the_reference(kernels, dtype):  # type: ignore[no-untyped-def]
    """Of ones: what is dropped is 0, and the mask of dh is that of h, also for columns of the last, partial block."""
    pre, a = (
        torch.ones(19, 2 * 300, dtype=dtype),
        record([torch.ones(19, 3, dtype=dtype), *[None] * 6], "relu", True, 0.4),
    )
    keep = keep_mask(SEED, 9, a.coords, 300, 0.4)
    assert torch.equal(kernels.gated(a, pre) != 0, keep)
    dpre = torch.empty_like(pre)
    h = kernels.gated_bwd(a, pre, torch.ones(19, 300, dtype=dtype), dpre, True)
    assert torch.equal(h != 0, keep) and torch.equal(dpre != 0, keep.repeat(1, 2))


def test_dropped_numbers_that_are_not_finite_are_zero(kernels):  # type: ignore[no-untyped-def]
    pre, a = torch.full((9, 40), torch.inf), record([torch.ones(9, 3), *[None] * 6], "relu", True, 0.5)
    h = kernels.gated(a, pre)
    assert torch.equal(h == 0, ~keep_mask(SEED, 9, a.coords, 20, 0.5)) and not h.isnan().any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("hidden_act", ["gelu", "silu"])
def test_small_and_large_numbers(kernels, hidden_act, scale):  # type: ignore[no-untyped-def]
    compare(kernels, make_inputs(9, 20, 24, torch.float16, scale=scale), hidden_act)


@pytest.mark.parametrize(("save_pre", "joins"), [(True, False), (False, True)])
@parametrize_wants(*GRADIENTS, sizes=(0, 1, 4, 5))
def test_what_is_not_wanted_is_not_there(kernels, wants, save_pre, joins):  # type: ignore[no-untyped-def]
    *tensors, dy = make_inputs(5, 6, 10, torch.float32, has_bias=True, joins=joins).values()
    a = record(tensors, "silu", save_pre, 0.2)
    _, pre = kernels.gated_mlp_fwd(a)
    a = a._replace(down_bias=None)
    whole = reference.gated_mlp_bwd(a, dy, pre, {*GRADIENTS})
    needs_x = "weight" in wants or (not save_pre and wants - {"down_bias"})
    part = kernels.gated_mlp_bwd(a if needs_x else a._replace(x=None), dy, pre, wants)
    assert part.keys() == wants
    for name in wants:
        torch.testing.assert_close(part[name], whole[name])


def test_runs_repeat_bit_for_bit(kernels):  # type: ignore[no-untyped-def]
    inputs = make_inputs(40, 24, 72, torch.float16, has_bias=True)
    first, second = (run(kernels, inputs, "silu", True, 0.1) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bytes_are_those_of_the_docstring(kernels):  # type: ignore[no-untyped-def]
    """Of the two kernels: every tensor [T, I] is read once and written once, without dropout nothing else is."""
    pre, a = torch.randn(24, 2 * 256), record([torch.ones(24, 3), *[None] * 6])
    with traffic() as forward:
        h = kernels.gated(a, pre)
    assert forward.times_loaded(pre) == forward.times_stored(h) == {1}
    assert forward.stored_bytes == h.nbytes
    assert forward.unique_bytes <= (pre.nbytes + h.nbytes) * (1 + RELATIVE["traffic_above_floor"])
    dh, dpre = torch.randn(24, 256), torch.empty_like(pre)
    with traffic() as backward:
        made = kernels.gated_bwd(a, pre, dh, dpre, True)
    assert made is dh, "h takes the memory of dh"
    assert backward.times_loaded(pre) == backward.times_loaded(dh) == backward.times_stored(dpre) == {1}
    assert backward.stored_bytes == dpre.nbytes + dh.nbytes
