"""One smoke case in this process: right or not, by how much, what was compiled, and how long it roughly takes."""

from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.kernels import timing
from benchmarks.kernels.case import KernelCase
from benchmarks.kit.record import reason
from benchmarks.registry import kernel_cases
from benchmarks.smoke.case import WHOLE, Skipped, SmokeCase
from benchmarks.smoke.compiled import CompiledKernels
from benchmarks.smoke.whole import whole_cases
from bert_fast.testing.compare import Comparison, comparisons

ROUNDS = 3
RUNS = 30  # with the same inputs: by then layers are run by programs
MOST_OUTPUTS = 12  # told of one case


def smoke_cases(family: str, size: str, is_dry: bool) -> list[SmokeCase]:
    """The cases of a family. is_dry: kernels do not run, so nothing is compared or timed."""
    if family == WHOLE:
        return whole_cases(size, is_dry)
    check = _launch if is_dry else _check
    return [SmokeCase(case.name, partial(check, case)) for case in kernel_cases(size, [family])]


def run(case: SmokeCase, device: torch.device, compiled: CompiledKernels) -> dict[str, Any]:
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


def _check(case: KernelCase, device: torch.device) -> dict[str, Any]:
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


def _launch(case: KernelCase, device: torch.device) -> dict[str, Any]:
    """Launches everything twice: by Triton, and prepared."""
    problem = case.make(device)
    with timing.launched_kernels() as kernels:
        timing.results_of(problem)
    timing.results_of(problem)
    return {"kernels": kernels}
