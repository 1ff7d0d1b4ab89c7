"""The Triton back-end of qkv_projection, in the interpreter, against the fp64 reference."""

import pytest
import torch
from torch import Tensor, nn

from bert_fast import backend
from bert_fast.reference import qkv_projection as reference
from bert_fast.reference.qkv_projection import QkvProjection
from bert_fast.storage import are_neighbours, join_memory
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import traffic
from bert_fast.torch import qkv_projection as aten
from tests.wants import parametrize_wants

from .linear_inputs import LAYOUTS, Tensors, check, randn, relaid, representable

pytestmark = pytest.mark.interpreter

OP = "qkv_projection"
PARAMETERS = ("wq", "bq", "wk", "bk", "wv", "bv")
GRADIENTS = ("x", "weight", "bias")


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def make_inputs(
    tokens: int, hidden_size: int, width: int, dtype: torch.dtype, *, weight_dtype: torch.dtype | None = None,
    has_bias: bool = True, are_joined: bool = True,
) -> Tensors:  # fmt: skip
    inputs: Tensors = {"x": randn(tokens, hidden_size, dtype=dtype)}
    for name in PARAMETERS:
        shape = (width, hidden_size) if name[0] == "w" else (width,)
        values = randn(*shape, dtype=weight_dtype or dtype, scale=max(1, hidden_size) ** -0.5)
        inputs[name] = nn.Parameter(values, False) if has_bias or name[0] == "w" else None
    if are_joined:
        join_memory(*(inputs[name] for name in PARAMETERS[::2]))
        join_memory(*(inputs[name] for name in PARAMETERS[1::2]))
    return inputs | {"dqkv": randn(tokens, 3 * width, dtype=dtype)}


def without_biases(a: QkvProjection) -> QkvProjection:
    """As backward is given it."""
    return a._replace(bq=None, bk=None, bv=None)


def run(family, inputs: Tensors) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    *tensors, dqkv = inputs.values()
    a = QkvProjection(*tensors)
    qkv = family.qkv_projection_fwd(a)
    wants = {"x", "weight"} if a.bq is None else {*GRADIENTS}
    made = family.qkv_projection_bwd(without_biases(a), dqkv, wants)
    assert made.keys() == wants
    return {"qkv": qkv} | {f"d{name}": gradient for name, gradient in made.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("are_joined", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 8, 16), (1, 65, 8), (7, 13, 31), (63, 64, 16), (70, 40, 24)], ids=str)
def test_sizes(kernels, shape, are_joined, dtype):  # type: ignore[no-untyped-def]
    check(OP, run, kernels, aten, reference, make_inputs(*shape, dtype, are_joined=are_joined))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_where_weights_lie_changes_no_bit(kernels, dtype):  # type: ignore[no-untyped-def]
    apart = make_inputs(33, 40, 24, dtype, are_joined=False)
    expected = run(kernels, apart)
    for names in (PARAMETERS[::2], PARAMETERS[1::2]):
        join_memory(*(apart[name] for name in names))
        assert are_neighbours(*(apart[name] for name in names))
    results = run(kernels, apart)
    assert all(torch.equal(results[name], expected[name]) for name in expected)


@pytest.mark.parametrize("are_joined", [True, False])
def test_fp32_parameters_beside_half_precision(kernels, are_joined):  # type: ignore[no-untyped-def]
    inputs = make_inputs(33, 40, 24, torch.float16, weight_dtype=torch.float32, are_joined=are_joined)
    outputs = check(OP, run, kernels, aten, reference, inputs)
    assert [outputs[name].dtype for name in ("dweight", "dbias")] == [torch.float32] * 2
    assert not representable(outputs["dweight"], torch.float16), "rounded to half precision on the way"


def test_without_biases(kernels):  # type: ignore[no-untyped-def]
    outputs = check(OP, run, kernels, aten, reference, make_inputs(9, 20, 24, torch.float32, has_bias=False))
    assert "dbias" not in outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(kernels, layout, dtype):  # type: ignore[no-untyped-def]
    inputs = make_inputs(20, 36, 16, dtype)
    check(OP, run, kernels, aten, reference, inputs | {name: relaid(inputs[name], layout) for name in ("x", "dqkv")})
    check(OP, run, kernels, aten, reference, inputs | {name: relaid(inputs[name], layout) for name in PARAMETERS[::2]})


@parametrize_wants(*GRADIENTS)
def test_what_is_not_wanted_is_not_there(kernels, wants):  # type: ignore[no-untyped-def]
    *tensors, dqkv = make_inputs(9, 12, 8, torch.float32).values()
    a = without_biases(QkvProjection(*tensors))
    whole = kernels.qkv_projection_bwd(a, dqkv, {*GRADIENTS})
    part = kernels.qkv_projection_bwd(a if "weight" in wants else a._replace(x=None), dqkv, wants)
    assert part.keys() == wants
    assert all(torch.equal(part[name], whole[name]) for name in wants)


def test_runs_repeat_bit_for_bit(kernels):  # type: ignore[no-untyped-def]
    inputs = make_inputs(99, 70, 24, torch.float16)
    first, second = run(kernels, inputs), run(kernels, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bytes_are_those_of_the_docstring(kernels):  # type: ignore[no-untyped-def]
    """Operands are read where they lie, each address at least once, results written once; nothing else."""
    inputs = make_inputs(70, 40, 24, torch.float16)
    *tensors, dqkv = inputs.values()
    a = QkvProjection(*tensors)
    with traffic() as forward:
        qkv = kernels.qkv_projection_fwd(a)
    assert forward.times_stored(qkv) == {1} and forward.stored_bytes == qkv.nbytes
    floor = sum(t.nbytes for t in a) + qkv.nbytes
    assert floor <= forward.unique_bytes <= floor * (1 + RELATIVE["traffic_above_floor"])
    assert all(0 not in forward.times_loaded(t) for t in a), "a copy was read instead"
    with traffic() as backward:
        made = kernels.qkv_projection_bwd(without_biases(a), dqkv, {"x", "weight"})
    assert backward.times_stored(made["x"]) == backward.times_stored(made["weight"]) == {1}
    assert 0 not in backward.times_loaded(a.wv), "a copy was read instead"
