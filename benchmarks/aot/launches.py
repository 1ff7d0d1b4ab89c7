"""Which kernels ship in which configurations: the launchers themselves are called, and their launches recorded.

`JITFunction.run` is replaced by a recorder, so nothing runs and no GPU is asked. A new kernel family needs only
`aot_cases()` in its file of `benchmarks/families`.
"""

import functools
import hashlib
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kit.programs import PACKAGE, digest
from benchmarks.registry import aot_cases


@dataclass(frozen=True)
class Launch:
    """What a launcher asked for: enough to compile the kernel."""

    kernel: Any
    signature: dict[str, Any]  # a type, or a tuple of them
    constants: dict[str, object]
    divisible_by_16: tuple[str, ...]
    options: dict[str, object]

    @property
    def num_warps(self) -> int:
        """Warps of a program, Triton's default where the launcher says nothing."""
        return int(self.options.get("num_warps", 4))  # type: ignore[call-overload]

    @property
    def identity(self) -> str:
        """Hash of everything that decides what is compiled, the programs of the kernel and of its helpers included."""
        constants = {name: _stable(value) for name, value in self.constants.items()}
        parts = (_stable(self.kernel), self.signature, constants, self.divisible_by_16, sorted(self.options.items()))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]

    def __reduce__(self) -> tuple[Any, ...]:
        """Kernels do not pickle: another process imports them by name."""
        place = self.kernel.fn.__module__, self.kernel.fn.__name__
        return _unpickled, (*place, self.signature, self.constants, self.divisible_by_16, self.options)


def _unpickled(module: str, name: str, *others: Any) -> Launch:
    return Launch(getattr(importlib.import_module(module), name), *others)


def _stable(value: Any) -> object:
    """A function of Triton's, or another constant, as text that is the same in every process.

    Functions of bert_fast by what they are made of (benchmarks/kit/programs.py), others by Triton's hash of the source.
    """
    if not hasattr(value, "cache_key"):
        return value
    package, _, file = value.__module__.rpartition(".")
    return _program(file, value.__name__) if package == PACKAGE else value.cache_key


_program = functools.cache(digest)  # what was imported stays as it is


_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8",
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip


def _integer(value: int) -> str:
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def launch_of(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> Launch:
    """What `JITFunction.run` is called with as a launch, specialized as Triton would do it on a device."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values.update({name: kwargs.pop(name) for name in list(kwargs) if name in kernel.arg_names})
    signature: dict[str, Any] = {}
    constants: dict[str, object] = {}
    divisible = []
    for param in kernel.params:
        value = values.get(param.name, param.default if param.has_default else None)
        specialized = not (param.is_constexpr or param.do_not_specialize)
        if param.is_constexpr or value is None or (specialized and type(value) is int and value == 1):
            signature[param.name] = "constexpr"
            constants[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = "*" + _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                divisible.append(param.name)
        elif hasattr(value, "block_shape"):  # a TensorDescriptor, which Triton knows by its tile alone
            signature[param.name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, bool):
            signature[param.name] = "u1"
        elif isinstance(value, tuple):  # of numbers that kernels are not specialized for, whatever they are
            assert all(one % 16 and one != 1 for one in value)
            signature[param.name] = tuple(map(_integer, value))
        elif isinstance(value, int):
            signature[param.name] = _integer(value)
            if specialized and value % 16 == 0:
                divisible.append(param.name)
        else:
            signature[param.name] = "fp32"
    return Launch(kernel, signature, constants, tuple(divisible), kwargs)


@contextmanager
def capture() -> Iterator[list[Launch]]:
    """Within the context Triton launches are recorded in the returned list instead of run."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    run = lambda kernel, *args, **kwargs: launches.append(launch_of(kernel, *args, **kwargs))  # noqa: E731
    with mock.patch.object(JITFunction, "run", run):
        yield launches


@dataclass(frozen=True)
class Configuration:
    """One kernel in one launch configuration; name: unique; a row adds the target."""

    name: str
    family: str
    launch: Launch
    facts: KernelFacts

    def row_facts(self, warp_size: int) -> dict[str, Any]:
        """What the case says and the listing cannot, as the row of a target with this warp size has it."""
        threads = warp_size * self.launch.num_warps
        return {
            "num_warps": self.launch.num_warps,
            "elements_per_thread": self.facts.live_elements / threads if self.facts.live_elements else None,
            "bytes_per_element": self.facts.bytes_per_element,
            "resident_threads": self.facts.resident_programs * threads,
            "multiply_adds_per_element": self.facts.multiply_adds,
            "needs_warpgroup_products": self.facts.needs_warpgroup_products,
            "product_tile": self.facts.product_tile,
            "needs_bulk_copies": self.facts.needs_bulk_copies,
            "is_specialized": self.facts.is_specialized,
        }


def configurations(families: Iterable[str] | None = None, target: str = "sm_90") -> list[Configuration]:
    """Every configuration of these families (all by default) on a target; launches of the same code appear once.

    Which family names such a shared launch depends on the alphabetical order of all families, so a table is written
    from all of them.
    """
    from bert_fast.triton._launch import assume_architecture

    found: dict[str, Configuration] = {}
    seen: set[str] = set()
    with assume_architecture(target):
        for family, case in aot_cases(families):
            with capture() as launches:
                case.launch()
            for launch in launches:
                if launch.identity not in seen:
                    seen.add(launch.identity)
                    one = _configuration(family, case, launch, found)
                    found[one.name] = one
    return list(found.values())


def _configuration(family: str, case: AotCase, launch: Launch, taken: dict[str, Configuration]) -> Configuration:
    function = launch.kernel.__name__
    name = f"{function.removeprefix('_').removesuffix('_kernel')} {case.name}"
    facts = case.kernels.get(function, KernelFacts())
    if facts.live_elements and case.has_dropout is not None:
        name += " dropout" if case.has_dropout else " plain"
    if name in taken and taken[name].family != family:
        name += f" ({family})"
    number, unique = 1, name
    while unique in taken:  # one case may launch one kernel more than once
        number += 1
        unique = f"{name} #{number}"
    return Configuration(unique, family, launch, facts)
