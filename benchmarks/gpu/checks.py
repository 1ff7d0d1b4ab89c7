"""One smoke case in this process: right or not, by how much, what was compiled, and how long it roughly takes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.kernels import timing
from benchmarks.kernels.case import KernelCase
from benchmarks.kit.programs import files, kernel_names
from benchmarks.kit.results import reason
from bert_fast.testing.compare import Comparison, comparisons

ROUNDS = 3
RUNS = 30  # with the same inputs: by then layers are run by programs
MOST_OUTPUTS = 12  # told of one case
WORD = 4  # bytes: Triton counts what is spilled in these


class Skipped(Exception):
    """What a case needs is not there."""


@dataclass(frozen=True)
class SmokeCase:
    """A case by name.

    check: given the device, compares (see `bert_fast.testing.compare`) or raises what is wrong; returns fields of the
    case's line.
    """

    name: str
    check: Callable[[Any], Any]


def run(case: SmokeCase, device: torch.device, compiled: "CompiledKernels") -> dict[str, Any]:
    """Fields of the case's line: outcome (green, red, skipped), error, outputs, compiled, and what the check gives."""
    fields: dict[str, Any] = {"outcome": "green", "error": None}
    with comparisons() as found, compiled.listening():
        try:
            fields |= case.check(device)
        except Skipped as why:
            fields |= {"outcome": "skipped", "error": str(why)}
        except Exception as failure:  # what stops a case is its result
            fields["error"] = reason(failure, 2000)
    outputs = by_output(found)
    wrong = [fields["error"] if fields["outcome"] != "skipped" else None, *(one.wrong for one in outputs)]
    if any(wrong):
        fields |= {"outcome": "red", "error": "; ".join(text for text in wrong if text)}
    return fields | {"outputs": [asdict(one) for one in outputs], "compiled": compiled.new()}


def by_output(found: list[Comparison]) -> list[Comparison]:
    """One comparison for each output, the worst where an output is compared in parts; the wrong ones first of many."""
    kept: dict[str, Comparison] = {}
    for one in found:
        if one.output not in kept or _badness(one) > _badness(kept[one.output]):
            kept[one.output] = one
    if len(kept) <= MOST_OUTPUTS:
        return list(kept.values())
    return sorted(kept.values(), key=_badness, reverse=True)[:MOST_OUTPUTS]


def _badness(one: Comparison) -> tuple[bool, float, float]:
    return one.wrong is not None, one.bad_share, one.worst / max(one.allowed_worst, 1e-300)


def check(case: KernelCase, device: torch.device) -> dict[str, Any]:
    """Twice from one seed, against the reference, again and again with the same bits, and by the clock."""
    checked = timing.check_case(case, device)
    fields = {"kernels": checked["kernels"]}
    if checked["error"]:
        return fields | {"error": checked["error"]}
    torch.manual_seed(0)
    problem = case.make(device)
    if problem.upstream is not None:  # a step goes on from where the last one ended
        first = timing.results_of(problem)
        for _ in range(RUNS):
            if error := timing.difference(first, timing.results_of(problem)):
                return fields | {"error": f"{error}, later ones than the second"}
    return fields | {"times": timing.quick_times(problem, device, ROUNDS)}


def launch(case: KernelCase, device: torch.device) -> dict[str, Any]:
    """Launches everything twice: by Triton, and prepared."""
    problem = case.make(device)
    with timing.launched_kernels() as kernels:
        timing.results_of(problem)
    timing.results_of(problem)
    return {"kernels": kernels}


class CompiledKernels:
    """The compiled kernels of bert_fast that were not told of before; `seconds` by Triton's hash of each."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._told: set[str] = set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the context, how long each compilation takes is noted; a kernel from Triton's cache takes next to no
        time.
        """
        try:
            from triton import knobs
        except ImportError:
            yield
            return
        before, knobs.compilation.listener = knobs.compilation.listener, self._note
        try:
            yield
        finally:
            knobs.compilation.listener = before

    def _note(self, *, metadata: dict[str, Any], times: Any, **_: Any) -> None:
        self._seconds[metadata["hash"]] = times.total / 1e6

    def new(self) -> list[dict[str, Any]]:
        """Kernel, compile_s, registers of a thread, spill_bytes of a thread, shared_bytes of a block, warps."""
        told = []
        for one in _loaded():
            if one.hash not in self._told:
                self._told.add(one.hash)
                told.append({
                    "kernel": one.metadata.name,
                    "compile_s": round(self._seconds.get(one.hash, 0.0), 2),
                    "registers": one.n_regs,
                    "spill_bytes": None if one.n_spills is None else WORD * one.n_spills,
                    "shared_bytes": one.metadata.shared,
                    "warps": one.metadata.num_warps,
                })  # fmt: skip
        return told


def _loaded() -> Iterator[Any]:
    """Every compiled kernel of the package that this process has."""
    for file in files():
        module = sys.modules.get(f"bert_fast.triton.{file}")
        for name in kernel_names(file) if module is not None else ():
            for cache, *_ in getattr(getattr(module, name), "device_caches", {}).values():
                yield from (one for one in cache.values() if hasattr(one, "n_regs"))
