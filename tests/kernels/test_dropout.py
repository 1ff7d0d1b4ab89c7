"""The Triton kernel of dropout, in the interpreter: the bits of the reference, forward and backward."""

import pytest
import torch
from torch import Tensor

from bert_fast import backend, ops
from bert_fast.reference import dropout as reference
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import traffic
from bert_fast.torch import dropout as aten

pytestmark = pytest.mark.interpreter

SEED, SITE = torch.tensor([-5]), 2**31 - 1


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve("dropout", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def coords_of(tokens: int) -> Tensor:
    index = torch.arange(tokens, dtype=torch.int32)
    return torch.stack((index // 3 + 2**31 - 64, index * 1_000_003 % 2**30), 1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a scale of 65,536 is too large for fp16
@pytest.mark.parametrize("p", [2.0**-16, 0.1, 0.5, 1 - 2**-16, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (7, 8), (9, 101), (3, 768), (17, 1030), (0, 8), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bits_are_those_of_the_reference(kernels, dtype, shape, p):  # type: ignore[no-untyped-def]
    x = torch.randn(shape).to(dtype)
    given = p, SEED, coords_of(len(x)), SITE
    for function in ("dropout_fwd", "dropout_bwd"):
        actual, expected = (getattr(module, function)(x, *given) for module in (kernels, reference))
        assert torch.equal(actual, expected) and actual.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values(kernels, dtype):  # type: ignore[no-untyped-def]
    x, given = torch.randn(17, 200).to(dtype), (0.1, SEED, coords_of(17), SITE)
    plain, truth = aten.dropout_fwd(x, *given), reference.dropout_fwd(x.double(), *given)
    assert_close_to_truth("dropout", "y", kernels.dropout_fwd(x, *given), plain, truth)


@pytest.mark.parametrize("p", [0.0, 2.0**-18])
def test_what_drops_nothing_is_a_copy(kernels, p):  # type: ignore[no-untyped-def]
    x = torch.randn(3, 5)
    y = kernels.dropout_fwd(x, p, None, None, 0)
    assert torch.equal(x, y) and x.data_ptr() != y.data_ptr()


@pytest.mark.parametrize(
    "layout", [lambda x: x.t().contiguous().t(), lambda x: x.repeat(1, 2)[:, :36], lambda x: x[::2]]
)
def test_strides(kernels, layout):  # type: ignore[no-untyped-def]
    x = layout(torch.randn(20, 36))
    given = 0.3, SEED, coords_of(40)[: 2 * len(x) : 2], SITE
    assert torch.equal(kernels.dropout_fwd(x, *given), reference.dropout_fwd(x, *given))


def test_what_is_dropped_is_zero_whatever_it_was(kernels):  # type: ignore[no-untyped-def]
    x = torch.full((5, 40), torch.inf)
    given = 0.5, SEED, coords_of(5), SITE
    keep = reference.keep_mask(SEED, SITE, coords_of(5), 40, 0.5)
    assert torch.equal(kernels.dropout_fwd(x, *given), torch.where(keep, x, 0.0))


def test_runs_repeat_bit_for_bit_and_gradients_too(kernels):  # type: ignore[no-untyped-def]
    x, dy = torch.randn(2, 33, 72).unbind()
    results = []
    for name in ("triton", "triton", "torch"):
        leaf = x.clone().requires_grad_()
        y = ops.dropout(leaf, 0.2, seed=SEED, coords=coords_of(33), site=3, backend=name)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    assert all(torch.equal(one, other) for others in results[1:] for one, other in zip(results[0], others, strict=True))


def test_bytes_are_those_of_the_docstring(kernels):  # type: ignore[no-untyped-def]
    x, coords = torch.randn(64, 512).half(), coords_of(64)
    with traffic() as found:
        y = kernels.dropout_fwd(x, 0.1, SEED, coords, SITE)
    assert found.times_stored(y) == found.times_loaded(x) == {1}
    floor = x.nbytes + y.nbytes + coords.nbytes + SEED.nbytes
    assert found.unique_bytes <= floor * (1 + RELATIVE["traffic_above_floor"])
