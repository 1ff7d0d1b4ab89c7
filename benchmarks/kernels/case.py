"""What an op family tells the benchmarks: cases to run, and calls whose kernels are compiled ahead of time.

A family's cases stand in `benchmarks/families/<op>.py` and nowhere else, each once. The file defines `cases()`, which
yields `KernelCase`s, and each of them says what it is for (`Use`). A family with kernels of its own also defines
`aot_cases()`, which yields `AotCase`s (benchmarks/aot/case.py). `benchmarks/registry.py` hands out both; nothing else
needs to know a family.

`make` draws from PyTorch's generators alone: after the same `torch.manual_seed` it yields the same problem.
"""

import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kit import bert
from bert_fast.testing.compare import assert_close_to_truth

_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Function = Callable[..., Tensor]
Upstream = Tensor | tuple[Tensor, ...]


class Use(Flag):
    """What a case is for; some are for more than one thing."""

    GPU = auto()  # timed on a GPU, at BERT's full shapes: `make gpu`
    SMOKE = auto()  # checked first on a GPU, at BERT-base's shapes; these launch every kernel: `make gpu-smoke`
    CPU = auto()  # timed on a CPU, in fp32: `make bench`
    SMALL = auto()  # a few rows, for tests, the sanitizer and the witness
    WITNESS = auto()  # for the witness alone: `make kernels`


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
    """One shape of one family in one dtype; uses: what it is for."""

    family: str
    shape: str  # "16384x768"
    dtype: torch.dtype
    variant: str  # what else tells it apart: "p0.1", "erf"
    make: Callable[[torch.device], Problem]
    uses: Use

    @property
    def name(self) -> str:
        """Stable name used in results and on the command line."""
        return f"kernel/{self.family}/{self.shape}/{dtype_name(self.dtype)}/{self.variant}"


def dtype_name(dtype: torch.dtype) -> str:
    """fp32, fp16 or bf16."""
    return _SHORT[dtype]


def full_shapes() -> Iterator[tuple[Use, int, bert.Size]]:
    """(uses, tokens, size) of BERT-base and BERT-large on a GPU; the smoke run takes the fewest tokens of BERT-base."""
    for num_tokens, size in itertools.product(bert.TOKENS, bert.SIZES):
        is_least = (num_tokens, size) == (bert.FEWEST_TOKENS, bert.BASE)
        yield Use.GPU | Use.SMOKE if is_least else Use.GPU, num_tokens, size


def verified_only(verify: Callable[[], None]) -> Problem:
    """A problem without contestants, for a case that nothing times."""
    return Problem((), None, lambda: None, lambda: None, bytes_moved={}, verify=verify)


def installed(**peers: tuple[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Other libraries' versions of an op, those that import here.

    peers: name -> ("module:function", how the function is called: given the function itself, then the inputs).
    """
    found = {}
    for name, (place, call) in peers.items():
        module, _, function = place.partition(":")
        with suppress(ImportError):
            library = importlib.import_module(module)
            if hasattr(library, function):
                found[name] = partial(call, getattr(library, function))
    return found


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
