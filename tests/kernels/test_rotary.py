"""The Triton kernel of rotary, in the interpreter: bits, bytes, offsets; values and strides are the op's tests."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference import rotary as reference
from bert_fast.reference.rotary import Rotary
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import traffic
from bert_fast.torch import rotary as aten

pytestmark = pytest.mark.interpreter


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve("rotary", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def record(*shape: int, dtype: torch.dtype = torch.float32, interleaved: bool = False) -> Rotary:
    angle = 3.0 * torch.randn(shape[0], shape[-1] // 2)
    return Rotary(torch.randn(shape).to(dtype), angle.cos(), angle.sin(), interleaved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_values(kernels, interleaved: bool, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    a = record(19, 3, 5, 24, dtype=dtype, interleaved=interleaved)
    exact = Rotary(a.qkv.double(), a.cos.double(), a.sin.double(), interleaved)
    assert_close_to_truth("rotary", "y", kernels.rotary_fwd(a), aten.rotary_fwd(a), reference.rotary_fwd(exact))
    dqkv, plain, truth = (
        module.rotary_bwd(given, given.qkv)["qkv"] for module, given in ((kernels, a), (aten, a), (reference, exact))
    )
    assert_close_to_truth("rotary", "dqkv", dqkv, plain, truth)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(37, 3, 7, 16), (9, 1, 1, 6), (3, 3, 12, 64)])
def test_runs_repeat_bit_for_bit_in_place_too(kernels, shape, interleaved) -> None:  # type: ignore[no-untyped-def]
    a = record(*shape, interleaved=interleaved)
    for is_backward in (False, True):
        first, second = (
            kernels.rotary_bwd(a._replace(qkv=None), a.qkv)["qkv"] if is_backward else kernels.rotary_fwd(a)
            for _ in range(2)
        )
        over = a._replace(qkv=a.qkv.clone())
        kernels.rotary_in_place(over, is_backward)
        assert torch.equal(first, second) and torch.equal(first, over.qkv)


def test_bf16_stays_within_a_unit_of_the_reference(kernels) -> None:  # type: ignore[no-untyped-def]
    a = record(5, 3, 2, 16, dtype=torch.bfloat16)
    actual, wide = kernels.rotary_fwd(a), reference.rotary_fwd(a._replace(qkv=a.qkv.float()))
    assert ((actual.float() - wide).abs() <= wide.abs() * RELATIVE["bf16_stored_by_interpreter"]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_bad_number_spoils_its_pair_alone(kernels, interleaved: bool) -> None:  # type: ignore[no-untyped-def]
    a = record(5, 3, 2, 16, interleaved=interleaved)
    a.qkv[3, 0, 1, 2] = torch.inf
    a.qkv[4, 2, 1, 2] = torch.nan
    bad = ~reference.rotary_fwd(a).isfinite()
    assert bad.sum() == 3 and torch.equal(~kernels.rotary_fwd(a).isfinite(), bad)


@pytest.mark.parametrize("interleaved", [False, True])
def test_bytes_are_those_of_the_docstring(kernels, interleaved: bool) -> None:  # type: ignore[no-untyped-def]
    a = record(64, 3, 4, 32, dtype=torch.float16, interleaved=interleaved)
    tables = a.cos.nbytes + a.sin.nbytes
    with traffic() as new:
        y = kernels.rotary_fwd(a)
    assert new.times_loaded(a.qkv) == new.times_stored(y) == {1}
    assert new.unique_bytes <= (2 * a.qkv.nbytes + tables) * (1 + RELATIVE["traffic_above_floor"])
    with traffic() as over:
        kernels.rotary_in_place(a, False)
    assert over.times_loaded(a.qkv) == over.times_stored(a.qkv) == {0, 1}, "value is not touched"
    assert over.stored_bytes == 2 * a.qkv.nbytes // 3
    assert over.unique_bytes <= (4 * a.qkv.nbytes // 3 + tables) * (1 + RELATIVE["traffic_above_floor"])


def test_offsets_beyond_two_to_the_31(kernels, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The second token lies 2^31 + 8 elements behind the first, in a sparse file that takes no space."""
    a, stride = record(2, 3, 2, 16, dtype=torch.float16), 2**31 + 8
    storage = torch.from_file(str(tmp_path / "x"), shared=True, size=stride + 96, dtype=torch.float16)
    far: Tensor = storage.as_strided(a.qkv.shape, (stride, 32, 16, 1)).copy_(a.qkv)
    expected = kernels.rotary_fwd(a)
    assert torch.equal(kernels.rotary_fwd(a._replace(qkv=far)), expected)
    kernels.rotary_in_place(a._replace(qkv=far), False)
    assert torch.equal(far, expected)


def test_every_size_has_a_configuration(kernels) -> None:  # type: ignore[no-untyped-def]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for heads, freqs in itertools.product((*range(1, 20), 64), (*range(1, 66), 128, 256)):
            config = kernels.launch_config(heads, freqs, dtype)
            sizes = config.tokens, config.heads, config.freqs
            assert all(size > 0 and size & (size - 1) == 0 for size in sizes) and config.freqs >= freqs
