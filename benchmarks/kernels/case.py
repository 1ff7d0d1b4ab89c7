"""What an op family tells the benchmarks: cases to time, and launches to compile ahead of time.

A family's cases live in `benchmarks/families/<op>.py`, which defines `cases()` (yields `KernelCase`: timed on a GPU)
and `aot_cases()` (yields `AotCase`). Nothing else needs to know the family. It may also define
    small_cases()   `KernelCase`s of a few rows, which a CPU, a sanitizer or a test gets through in moments
    smoke_cases()   `KernelCase`s of one BERT-base shape, which launch every kernel of the family: `make gpu-smoke`
    cpu_cases()     `KernelCase`s in fp32, timed by `make bench` on a CPU
`make` draws from PyTorch's generators alone: after the same `torch.manual_seed` it yields the same problem.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bert_fast.testing.compare import assert_close_to_truth

Function = Callable[..., Tensor]
Upstream = Tensor | tuple[Tensor, ...]
_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass
class Problem:
    """Tensors and contestants of one case on one device.

    inputs: what contestants are called with; those that require gradients get a backward pass.
    upstream: gradient of the output; None where there is no backward pass (optimizer steps).
    fast: bert_fast's op; eager: the same function as PyTorch users write it (timed as it is and compiled); peers: other
        libraries' versions, only those that import here. All take *inputs (or their own) and return the output.
    bytes_moved: mode -> the floor of the family's docstring. Modes: "fwd" and "bwd"; or "fwd_bwd", both in one launch,
        where contestants do not agree which of them does what; or "step".
    verify: raises AssertionError where bert_fast's results on these very inputs are wrong; called before any timing.
    flops: mode -> floating-point operations, for families bound by arithmetic; empty for those bound by memory.
    own_inputs: contestant -> (inputs, upstream) of its own, where it works on another layout of such a batch (padded,
        beside packed); "compiled" is one of them. One that returns several tensors has as many upstream gradients.
    """

    inputs: tuple[Tensor, ...]
    upstream: Tensor | None
    fast: Callable[..., Tensor | None]
    eager: Callable[..., Tensor | tuple[Tensor, ...] | None]
    bytes_moved: dict[str, int]
    verify: Callable[[], None]
    peers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    own_inputs: dict[str, tuple[tuple[Tensor, ...], Upstream]] = field(default_factory=dict)

    def arguments_of(self, provider: str) -> tuple[tuple[Tensor, ...], Upstream | None]:
        """What a contestant is called with, and the gradient of its output or outputs."""
        return self.own_inputs.get(provider, (self.inputs, self.upstream))


@dataclass(frozen=True)
class KernelCase:
    """One shape of one family, timed forward and backward (or one step)."""

    family: str
    shape: str  # "16384x768"
    dtype: torch.dtype
    variant: str  # what else tells it apart: "p0.1", "erf"
    make: Callable[[torch.device], Problem]

    @property
    def name(self) -> str:
        """Stable name used in results and on the command line."""
        return f"kernel/{self.family}/{self.shape}/{dtype_name(self.dtype)}/{self.variant}"


@dataclass(frozen=True)
class AotCase:
    """One call of a family's launchers; every kernel that it launches is compiled.

    name: stable, without the dropout flag; has_dropout: whether something is dropped, None for a family without.
    live_elements: kernel name -> elements of one [T, H] tensor that one program treats at a time, padding left out; of
        attention, scores of a tile.
    resident_programs: kernel name -> programs that the launcher counts on one NVIDIA multiprocessor to hold at once.
    bytes_per_element: kernel name -> bytes that the floor reads and writes per live element (for issue-slot budgets).
    multiply_adds: kernel name -> those of its matrix products per live element; not for kernels that have none.
    warpgroup_products: kernels whose dtype and tiles (64 rows for four warps) let sm_90 use its fastest products.
    product_tiles: kernel name -> (rows, columns, step along the sum) of the output tile of a matrix product.
    bulk_copies: kernels whose operands sm_90's copy engine moves. specialized: those with warps of their own for it.
    """

    name: str
    has_dropout: bool | None
    launch: Callable[[], object]
    live_elements: dict[str, int]
    resident_programs: dict[str, int]
    bytes_per_element: dict[str, float] = field(default_factory=dict)
    multiply_adds: dict[str, int] = field(default_factory=dict)
    warpgroup_products: frozenset[str] = frozenset()
    product_tiles: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    bulk_copies: frozenset[str] = frozenset()
    specialized: frozenset[str] = frozenset()


def dtype_name(dtype: torch.dtype) -> str:
    """fp32, fp16 or bf16."""
    return _SHORT[dtype]


def assert_gradients_close(
    op: str, names: tuple[str, ...], fast: Function, plain: Function, inputs: tuple[Tensor, ...], upstream: Tensor
) -> None:
    """Asserts that output and gradients of `fast` err no more than those of `plain`, both against `plain` in fp64.

    names: of the output and of the gradients of those inputs that require one, as the table of tolerances has them.
    plain must be the very same function, masks included.
    """

    def results(function: Function, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y = function(*arguments)
        leaves = [t for t in arguments if t.requires_grad]
        return y.detach(), *torch.autograd.grad(y, leaves, upstream.to(y.dtype))

    doubles = tuple(t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs)
    triples = zip(results(fast, inputs), results(plain, inputs), results(plain, doubles), strict=True)
    for name, outputs in zip(names, triples, strict=True):
        assert_close_to_truth(op, name, *outputs)
