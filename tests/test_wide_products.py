"""fp32 products of half-precision operands: what the library refuses is gone round, with the same rounding.

The CPU's library has none of them, so that one can be given to it, and taken away.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import devices
from bert_fast.testing.compare import assert_close_to_truth
from tests.pretended_gpu import GPU, OnGpu, PretendedGpu

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
CPU = torch.device("cpu")
WAYS = ("addmm", "mm", "widened")


class Library:
    """The CPU's products with an fp32 result: those of the names, the others refused with an error."""

    def __init__(self, names: tuple[str, ...], error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._aten = torch.library.Library("aten", "IMPL")
        for name in ("mm", "addmm"):
            if name in names or error is not None:
                product = self._product(name, None if name in names else error)
                self._aten.impl(f"{name}.dtype_out", product, "CPU")
                self._aten.impl(f"{name}.dtype", lambda *given, run=product, **how: run(*given, **how, out=None), "CPU")

    def _product(self, name: str, error: Exception | None) -> Callable[..., Tensor]:
        def run(*operands: Any, out: Tensor | None, beta: Any = 1, alpha: Any = 1) -> Tensor:
            self.calls.append(name)
            if error is not None:
                raise error
            *addend, a, b, dtype = operands
            assert dtype is torch.float32 and a.dtype is b.dtype and a.dtype is not dtype
            made = a.to(dtype) @ b.to(dtype)
            made = addend[0] + made if addend else made
            return made if out is None else out.copy_(made)

        return run


@pytest.fixture
def give() -> Iterator[Callable[..., Library]]:
    """Gives the CPU's library products, in place of those given before; nothing that was asked is known."""
    given: list[Library] = []

    def make(*arguments: Any) -> Library:
        take()
        given.append(Library(*arguments))
        return given[-1]

    def take() -> None:
        devices.wide_products.clear()
        while given:
            given.pop()._aten._destroy()

    yield make
    take()


ERRORS = [
    None,  # there is no such overload, or none for the device: NotImplementedError
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasGemmEx"),
    TypeError("addmm() got an unexpected keyword argument 'out_dtype'"),
]


@pytest.mark.parametrize("error", ERRORS, ids=["missing", "cublas", "no argument"])
@pytest.mark.parametrize(("has", "way"), [(("mm", "addmm"), "addmm"), (("mm",), "mm"), ((), "widened")], ids=WAYS)
def test_what_the_library_takes_is_found_once(
    has: tuple[str, ...], way: str, error: Exception | None, give: Any
) -> None:
    library = give(has, error)
    for _ in range(3):
        assert devices.wide_products[CPU, torch.bfloat16] == way
    assert len(library.calls) <= 2
    calls = len(library.calls)
    assert devices.wide_products[CPU, torch.float16] == way
    assert len(library.calls) == 2 * calls, "another type is asked for by itself"


def test_too_little_memory_is_no_refusal(give: Any) -> None:
    give((), torch.OutOfMemoryError("tried to allocate 80 GiB"))
    with pytest.raises(torch.OutOfMemoryError):
        devices.wide_products[CPU, torch.bfloat16]
    with pytest.raises(torch.OutOfMemoryError):
        devices.wide_products[CPU, torch.bfloat16]  # nothing was decided
    give(())
    assert devices.wide_products[CPU, torch.bfloat16] == "widened"


BROKEN = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: unspecified launch failure",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate(handle)",
]


@pytest.mark.parametrize("text", BROKEN, ids=["access", "launch", "execution", "memory", "handle"])
@pytest.mark.parametrize("has", [(), ("mm",)], ids=["both", "addmm"])
def test_a_broken_device_is_no_refusal(text: str, has: tuple[str, ...], give: Any) -> None:
    """What it says is raised, and nothing is taken for an answer."""
    kind = getattr(torch, "AcceleratorError", RuntimeError) if "CUBLAS" not in text else RuntimeError
    give(has, kind(text))
    for _ in range(2):
        with pytest.raises(kind, match=re.escape(text)):
            devices.wide_products[CPU, torch.bfloat16]
    give(WAYS[:2])
    assert devices.wide_products[CPU, torch.bfloat16] == "addmm"


def test_nothing_is_asked_in_a_capture(give: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor remembered; what was found before holds there."""
    library, gpu, is_capturing = give(("mm", "addmm")), PretendedGpu(monkeypatch), True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    with gpu:
        assert devices.wide_products[GPU, torch.bfloat16] == "widened" and not library.calls
        is_capturing = False
        assert devices.wide_products[GPU, torch.bfloat16] == "addmm" and library.calls
        is_capturing = True
        assert devices.wide_products[GPU, torch.bfloat16] == "addmm"


@pytest.mark.parametrize("accumulate", [False, True], ids=["made", "added"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("has", "wanted"), [(("mm", "addmm"), ("mm", "addmm")), (("mm",), ("mm", "mm")), ((), (None, None))], ids=WAYS
)
def test_ways_round_have_the_rounding_of_the_product(
    has: tuple[str, ...], wanted: Any, dtype: torch.dtype, accumulate: bool, give: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the fp32 sum alone: a product rounded to half precision in between is out of tolerance."""
    pytest.importorskip("triton")
    from bert_fast.triton import _gemm

    library, gpu = give(has), PretendedGpu(monkeypatch)
    a, b, acc = torch.randn(40, 300).to(dtype), torch.randn(300, 24).to(dtype), torch.randn(40, 24)
    out = acc.clone()
    with gpu, _gemm.by_library():
        devices.wide_products[GPU, dtype]
        library.calls.clear()
        _gemm.product(OnGpu(a), OnGpu(b), out=OnGpu(out), accumulate=accumulate)
    assert library.calls == [one for one in wanted[accumulate : accumulate + 1] if one]
    truth, plain = a.double() @ b.double(), a.float() @ b.float()
    rounded = plain.to(dtype).float()
    if accumulate:
        truth, plain, rounded = (acc + one for one in (truth, plain, rounded))
    assert_close_to_truth("gemm", "c_of_half", out, plain, truth)
    with pytest.raises(AssertionError):
        assert_close_to_truth("gemm", "c_of_half", rounded, plain, truth)


@pytest.mark.parametrize("has", [("mm", "addmm"), ()], ids=["mm", "widened"])
def test_weight_gradients_of_the_torch_back_end_too(
    has: tuple[str, ...], give: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bert_fast.torch import _gemm

    library = give(has)
    dy, x = torch.randn(300, 40).bfloat16(), torch.randn(300, 24).bfloat16()
    with PretendedGpu(monkeypatch):
        made = _gemm.weight_gradient(OnGpu(dy), OnGpu(x), torch.float32)
    plain = dy.float().t() @ x.float()
    assert library.calls[1:] == (["mm"] if has else [])
    assert_close_to_truth("gemm", "c_of_half", made.inner, plain, dy.double().t() @ x.double())
