"""Where the device's time of a training step goes: kernels by name, launches, how busy it is, its longest gaps.

A profile is of three steps without a wait between them, from the kernels that the driver's profiler reports
(torch.profiler over CUPTI or ROCm's, without stacks). Beside it the time of a step, by the host's clock and unprofiled,
in two ways: with a wait for the device after every step (`ms`), and with one after every five (`ms_steady`), which is
what a training loop pays.
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.kit.clock import interleaved
from benchmarks.kit.results import reason
from benchmarks.models import finetuning_steps, step_cases
from benchmarks.models.finetuning_steps import FinetuneCase, FinetuneRace
from benchmarks.models.step_cases import GRAPH, StepCase
from benchmarks.models.training_steps import STEADY_STEPS, Contestant, Race

PROFILED_STEPS = 3
ROUNDS, STEADY_ROUNDS = 5, 3
MOST_KERNELS, MOST_GAPS = 16, 10  # in a stored line
NAME_CHARACTERS = 72
PROVIDERS = ("bert_fast", GRAPH, "fused", "sdpa")

_FINETUNING = finetuning_steps.CASES
_PRETRAINING = (StepCase("base", "full", 128, 256), StepCase("large", "full", 512, 32))
CASES: tuple[StepCase, ...] = (*_FINETUNING, *_PRETRAINING)
SMALL_CASES: tuple[StepCase, ...] = (*finetuning_steps.SMALL_CASES, step_cases.SMALL_CASES[0])


class Kernel(NamedTuple):
    """One kernel, copy or fill on the device. start, end: microseconds."""

    name: str
    start: float
    end: float


def account(kernels: Iterable[Kernel], num_steps: int) -> dict[str, Any]:
    """What a stored line says of the kernels of so many steps; times and numbers are of one step.

    gpu_ms: while at least one kernel runs. busy_share: gpu_ms of the time from the first kernel's start to the last
    one's end. gaps: [microseconds, the kernel behind it], the longest of all steps.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    busy = 0.0
    until = ordered[0].start if ordered else 0.0
    gaps: list[tuple[float, str]] = []
    by_name: dict[str, list[float]] = {}
    for kernel in ordered:
        if kernel.start > until:
            gaps.append((kernel.start - until, kernel.name))
        busy += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
        by_name.setdefault(kernel.name, []).append(kernel.end - kernel.start)
    span = until - ordered[0].start if ordered else 0.0
    rows = sorted(by_name.items(), key=lambda row: -sum(row[1]))
    shown = [[short(name), _per(sum(us), num_steps, 1), _per(len(us), num_steps, 2)] for name, us in rows]
    return {
        "gpu_ms": _per(busy / 1e3, num_steps, 3),
        "launches": _per(len(ordered), num_steps, 1),
        "busy_share": round(busy / span, 4) if span else None,
        "kernels": shown[:MOST_KERNELS],
        "other_kernels": [len(rows[MOST_KERNELS:]), _per(sum(sum(us) for _, us in rows[MOST_KERNELS:]), num_steps, 1)],
        "gaps": [[round(us, 1), short(name)] for us, name in sorted(gaps, reverse=True)[:MOST_GAPS]],
    }


def short(name: str) -> str:
    """A kernel's name without what all of a kind have, cut."""
    return re.sub(r"\bvoid |\bat::native::|\(anonymous namespace\)::", "", name)[:NAME_CHARACTERS]


def _per(amount: float, num_steps: int, digits: int) -> float:
    return round(amount / num_steps, digits)


def profiled(contestant: Contestant, device: torch.device) -> list[Kernel]:
    """The kernels of `PROFILED_STEPS` steps; none on a CPU."""
    if device.type != "cuda":
        contestant.steps(PROFILED_STEPS)
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        contestant.steps(PROFILED_STEPS)
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def profile_case(case: StepCase, device: torch.device, compile_backend: str = "inductor") -> Iterator[dict[str, Any]]:
    """Yields a result for each contestant, one after the other, or {"provider", "skipped"}."""
    is_finetuning = isinstance(case, FinetuneCase)
    race = (FinetuneRace if is_finetuning else Race)(case, device, ROUNDS, None, compile_backend)
    for provider in finetuning_steps.PROVIDERS if is_finetuning else PROVIDERS:
        yield from race.enter(provider)
        contestant = race.contestants.pop(provider, None)  # its memory is the next one's
        if contestant is None:
            continue
        try:
            yield {"case": case.name, "provider": provider, **_result(contestant, device)}
        except Exception as failure:  # of the device or its profiler: the next may go
            yield {"provider": provider, "skipped": reason(failure, 300)}
        finally:
            del contestant
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _result(contestant: Contestant, device: torch.device) -> dict[str, Any]:
    waits = interleaved({"": contestant.step}, ROUNDS)[""]
    steady = interleaved({"": partial(contestant.steps, STEADY_STEPS)}, STEADY_ROUNDS, warmup=0)[""]
    host = sorted(contestant.host_seconds[-ROUNDS:])[ROUNDS // 2]
    return {
        "ms": round(waits.median * 1e3, 3),
        "ms_steady": round(steady.median * 1e3 / STEADY_STEPS, 3),
        "host_ms": round(host * 1e3, 3),
        **account(profiled(contestant, device), PROFILED_STEPS),
    }
