"""The parts of `make gpu`, in processes that `driver.py` starts within their budgets.

    python -m benchmarks.gpu.parts PART --run FILE [--family NAME] [--until T] [--progress FILE] [--only NAMES]

    smoke      every case of a family once: right, repeatable, roughly how fast; or whole models
    sanitized  every small case, whatever comes out: what runs under compute-sanitizer
    ceilings   copy bandwidth and bf16 matrix rate
    verify     every case of a family against fp64, and twice, bit for bit
    compile    torch.compile of every verified case, into the compiler's cache on disk
    prepare    compilation of what others time, into caches on disk; over the null driver, of all that there is
    time       bert_fast, eager and compiled in turn, cases of all families that verified green only
    peers      bert_fast and other libraries in turn, for the cases of all families that have any
    gemm       the library's matrix products and ours in turn, with every tile; what a device's table is made from
    profile    where the device's time of training steps goes: kernels by name, launches, gaps
    steps      whole steps of pre-training against transformers', with MFU
    finetune   whole steps of fine-tuning against transformers' and flash attention on flattened inputs
    embedding  contrastive steps, and raw text to vectors, against sentence-transformers, padded and packed
    runs       whole training runs by our Trainer: tokens/s, MFU, memory, waiting for batches

FILE holds what `Run` holds, as JSON. A part stops by itself before T, in seconds of `time.monotonic`, and records what
it left out; should it hang, it is killed, and what it had recorded stays. A case that leaves the device unusable ends
the process; with --progress, the next one goes on behind that case. --only: names of cases, as JSON.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gemm_tuning import timing as gemm_tuning
from benchmarks.gemm_tuning.products import PRODUCTS, SMALL_PRODUCTS
from benchmarks.gpu import checks
from benchmarks.gpu.ahead import calls
from benchmarks.gpu.run import Run, is_dry
from benchmarks.gpu.sanitizer import THROUGH
from benchmarks.gpu.smoke import GREEN, WHOLE
from benchmarks.gpu.summary import shown
from benchmarks.gpu.whole import whole_cases
from benchmarks.kernels import timing
from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.ceilings import ceilings_of, measure_ceilings
from benchmarks.kit.clock import Seconds
from benchmarks.kit.crashes import Progress, is_usable, leave
from benchmarks.kit.results import reason
from benchmarks.models import finetuning_steps, step_cases, step_profiles, training_steps
from benchmarks.registry import kernel_cases


@dataclass(frozen=True)
class Job:
    """One part in one process: what it stores, shows and leaves out.

    family: whose cases, or a variant of the part. progress: what processes before this one have begun. only: names of
    the cases to run, None for all. share: "1/3" for every third case of them, from the second on.
    """

    part: str
    run: Run
    family: str = ""
    seconds: float = float("inf")
    progress: Progress = field(default_factory=lambda: Progress(None))
    only: list[str] | None = None
    share: str = "0/1"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if is_dry(self.run.device) else self.run.device)

    @property
    def is_small(self) -> bool:
        """Whether this is a test, of cases that a CPU gets through."""
        return self.run.size == "small"

    def stored(self, kind: str) -> list[dict[str, Any]]:
        """What this run has stored so far, by all of its processes."""
        return self.run.recorder.of_this_run(kind)

    def store(self, kind: str, **fields: Any) -> None:
        say(shown(self.run.recorder.write(kind, **fields)))

    def leave_out(self, case: Any, why: str, provider: str | None = None) -> None:
        family = getattr(case, "family", None)
        fields = {"part": self.part, "family": family, "case": case.name, "provider": provider, "reason": why}
        self.run.recorder.write("skipped", **fields)
        say(f"{case.name}{f' {provider}' if provider else ''}: left out: {why}")

    def cases(self, cases: Iterable[Any]) -> Iterator[Any]:
        """Case by case, as long as there is time; behind those that were begun, and not behind one that leaves the
        device unusable: that one ends this process.
        """
        first, step = map(int, self.share.split("/"))
        wanted = [case for case in list(cases)[first::step] if self.only is None or case.name in self.only]
        self.progress.plan([case.name for case in wanted])
        begun = set(self.progress.begun())
        for case in Seconds(self.seconds).of([case for case in wanted if case.name not in begun], self.leave_out):
            self.progress.begin(case.name)
            yield case
            if not is_usable(self.device):
                say(f"{case.name}: the device no longer answers; another process goes on behind this case")
                leave()
            self.progress.end(case.name)

    def each(self, cases: Iterable[Any], kind: str, results: Callable[[Any], Iterable[dict[str, Any]]]) -> bool:
        """Stores the results of case after case. What stops a case is why it is left out: the next may be smaller."""
        for case in self.cases(cases):
            try:
                for result in results(case):
                    if "skipped" in result:
                        self.leave_out(case, result["skipped"], result["provider"])
                    else:
                        self.store(kind, **result)
            except Exception as failure:  # memory of the device, a file that is not there, what ships does not run
                self.leave_out(case, reason(failure))
        return True

    def green(self, families: Iterable[str] | None, report: bool = False) -> Iterator[KernelCase]:
        """Cases of these families, all for None, that verified green in this run; with `report` the others are recorded
        as left out.
        """
        checked = {line["case"]: line["ok"] for line in self.stored("verify")}
        report = report and not self.progress.begun()  # another process has
        for case in kernel_cases(self.run.size, families):
            if checked.get(case.name):
                yield case
            elif report:
                why = "verified red" if case.name in checked else "not verified in this run"
                self.leave_out(case, f"{why}: not timed")


def smoke(job: Job) -> bool:
    """Returns whether all cases are right. Over the null driver nothing is compared or timed."""
    dry, size, compiled = is_dry(job.run.device), "small" if job.is_small else "smoke", checks.CompiledKernels()
    if job.family == WHOLE:
        cases = whole_cases(size, dry)
    else:
        check = checks.launch if dry else checks.check
        cases = [checks.SmokeCase(case.name, partial(check, case)) for case in kernel_cases(size, [job.family])]
    is_alone, all_right = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1", True
    for case in job.cases(cases):
        start = time.monotonic()
        fields = checks.run(case, job.device, compiled)
        fields |= {} if is_usable(job.device) else {"outcome": "crash"}
        fields |= {"blocking": is_alone, "seconds": round(time.monotonic() - start, 2)}
        job.store("smoke", family=job.family, case=case.name, **fields)
        all_right &= fields["outcome"] in GREEN
    return all_right


def sanitized(job: Job) -> bool:
    """Forward and backward, or steps, of every small case; says which kernels were launched."""
    with timing.launched_kernels() as kernels:
        for case in job.cases(kernel_cases("small", job.run.families)):
            torch.manual_seed(0)
            timing.results_of(case.make(job.device))
    say(" ".join([THROUGH, *sorted(kernels)]))
    return True


def prepare(job: Job) -> bool:
    """Compiles ahead of what is timed, by running it; family: what (`ahead.calls`). What fails is left out here.

    Returns whether all could be compiled over the null driver. On a GPU the part that it was for meets it again.
    """
    is_whole = True
    for case in job.cases(checks.SmokeCase(*each) for each in calls(job.family, job.run)):
        try:
            case.check(job.device)
        except checks.Skipped:  # for want of a GPU
            pass
        except Exception as failure:
            job.leave_out(case, reason(failure, 300))
            is_whole = False
    return is_whole or not is_dry(job.run.device)


def ceilings(job: Job) -> bool:
    small: dict[str, Any] = {"copy_bytes": (10**6,), "matmul_size": 64, "rounds": 3} if job.is_small else {}
    for result in measure_ceilings(job.device, **small):
        job.store("ceiling", **result)
    return True


def verify(job: Job) -> bool:
    """Returns whether all cases are right."""
    all_right = True
    for case in job.cases(kernel_cases(job.run.size, [job.family])):
        start = time.monotonic()
        result = timing.check_case(case, job.device)
        job.store("verify", **result, seconds=round(time.monotonic() - start, 2))
        all_right &= result["ok"]
    return all_right


def compile_(job: Job) -> bool:
    """Compiles forward and backward of the eager functions by running them; a failure is recorded, not an error."""
    for case in job.cases(job.green([job.family])):
        start, error = time.monotonic(), None
        try:
            torch.manual_seed(0)
            problem = case.make(job.device)
            inputs, upstream = problem.arguments_of("compiled")
            output = timing.compile_eager(problem.eager, job.run.compile_backend)(*inputs)
            if upstream is not None:
                timing.gradients_of(output, inputs, upstream, allow_unused=True)
        except Exception as failure:  # the compiler's failure is its result
            error = reason(failure)
        took = round(time.monotonic() - start, 2)
        job.store("compile", family=job.family, case=case.name, ok=error is None, error=error, seconds=took)
    return True


def time_(job: Job) -> bool:
    """Times what verified green; what `compile` did not get done in this run is timed without the compiled version.

    family: one, or "" for all of the run.
    """
    compiled = {line["case"] for line in job.stored("compile") if line["ok"]}

    def results(case: KernelCase) -> Iterator[dict[str, Any]]:
        if case.name not in compiled:
            yield {"provider": "compiled", "skipped": "not compiled in this run"}
        yield from _timed(job, case, timing.PROVIDERS if case.name in compiled else timing.PROVIDERS[:2])

    green = job.green([job.family] if job.family else job.run.families, report=True)
    return job.each(_most_telling_first(job, green), "timing", results)


def peers(job: Job) -> bool:
    """Times bert_fast again, in turn with other libraries, for the cases of all families that have any here."""
    with_peers = {line["case"]: line["family"] for line in job.stored("timing") if line.get("peers")}
    if not with_peers:
        say("no other library with such kernels imports here")
        return True
    green = job.green(sorted(set(with_peers.values())))
    cases = [case for case in green if case.name in with_peers]
    return job.each(
        _most_telling_first(job, cases), "timing", lambda case: _timed(job, case, ["bert_fast"], with_peers=True)
    )


def _timed(job: Job, case: KernelCase, providers: Iterable[str], with_peers: bool = False) -> Iterator[dict[str, Any]]:
    kernels = _launched_by_case(job)[case.name]
    rounds, ceilings = job.run.rounds or timing.ROUNDS, ceilings_of(job.stored("ceiling"))
    yield from timing.time_case(
        case, job.device, providers, with_peers=with_peers, rounds=rounds, seconds=timing.CASE_SECONDS,
        ceilings=ceilings, compile_backend=job.run.compile_backend, kernels=kernels,
    )  # fmt: skip


def _launched_by_case(job: Job) -> dict[str, dict[str, str]]:
    return {line["case"]: line["kernels"] for line in job.stored("verify")}


def _most_telling_first(job: Job, cases: Iterable[KernelCase]) -> list[KernelCase]:
    """Every kernel, then every family, as early as possible: should time run out, variations are missing.

    Families take turns, each with 16,384 tokens, the size that pages show, first. In that order come the cases
    that launch a kernel which none before them launches, and then the others.
    """
    by_family: dict[str, list[KernelCase]] = {}
    for case in sorted(cases, key=lambda case: not case.shape.startswith("16384")):
        by_family.setdefault(case.family, []).append(case)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_family.values()))
    launched, covered = _launched_by_case(job), set[str]()
    with_a_new_kernel: list[KernelCase] = []
    others: list[KernelCase] = []
    for case in turns:
        if case is not None:
            kernels = set(launched[case.name])
            (others if kernels <= covered else with_a_new_kernel).append(case)
            covered |= kernels
    return with_a_new_kernel + others


def gemm(job: Job) -> bool:
    """Times matrix products: the library, and each tile.

    family: "specialized" for the tiles that have warps of their own for loads, "" for all others. Those are the
    likeliest to hang, which would cost all that follows in the same process: so the others come first, in another.
    """
    is_specialized, rounds = job.family == "specialized", job.run.rounds or gemm_tuning.ROUNDS
    products = SMALL_PRODUCTS if job.is_small else PRODUCTS
    if is_specialized:
        products = tuple(product for product in products if gemm_tuning.tiles_for(product, job.device, True))
    return job.each(products, "gemm", lambda one: gemm_tuning.time_product(one, job.device, rounds, is_specialized))


def steps(job: Job) -> bool:
    """Times whole training steps; family: "compiled" for transformers' under torch.compile, "" for all others."""
    cases, options = _cases_of(step_cases, job), _options(job, 8)
    cases = [case for case in cases if case.is_compiled or not options["is_compiled"]]
    return job.each(cases, "step", lambda case: training_steps.time_steps(case, job.device, **options))


def finetune(job: Job) -> bool:
    """Times whole steps of fine-tuning; family: as of `steps`."""
    cases, options = _cases_of(finetuning_steps, job), _options(job, 12)
    return job.each(cases, "finetune", lambda case: finetuning_steps.time_steps(case, job.device, **options))


def profile(job: Job) -> bool:
    """Profiles whole training steps."""
    cases = _cases_of(step_profiles, job)
    return job.each(cases, "profile", lambda case: step_profiles.profile_case(case, job.device))


def runs(job: Job) -> bool:
    """Times whole training runs, one after the other."""
    from benchmarks.models import training_runs  # which needs accelerate

    cases = _cases_of(training_runs, job)
    return job.each(cases, "run", lambda case: training_runs.time_run(case, _matmul_ceiling(job)))


def embedding(job: Job) -> bool:
    """Times contrastive steps and encoding."""
    from benchmarks.embedding import on_device

    cases, rounds = _cases_of(on_device, job), job.run.rounds or 5
    return job.each(cases, "embedding", lambda case: on_device.time_embedding(case, job.device, rounds))


def _cases_of(module: Any, job: Job) -> Sequence[Any]:
    return module.SMALL_CASES if job.is_small else module.CASES


def _options(job: Job, rounds: int) -> dict[str, Any]:
    """How steps are timed."""
    return {
        "rounds": job.run.rounds or rounds, "compile_backend": job.run.compile_backend,
        "matmul_tflop_s": _matmul_ceiling(job), "is_compiled": job.family == "compiled",
    }  # fmt: skip


def _matmul_ceiling(job: Job) -> float | None:
    return ceilings_of(job.stored("ceiling")).matmul_tflop_s


def say(text: str) -> None:
    print(text, flush=True)


PARTS: dict[str, Callable[[Job], bool]] = {
    part.__name__.rstrip("_"): part
    for part in (
        smoke, sanitized, prepare, ceilings, verify, compile_, time_, peers, gemm, profile, steps, finetune, embedding,
        runs,
    )
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if a case is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.parts", description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--family", default="")
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--progress", type=Path)
    parser.add_argument("--only", type=json.loads)
    parser.add_argument("--share", default="0/1")
    options = parser.parse_args(arguments)
    seconds, progress, run = options.until - time.monotonic(), Progress(options.progress), Run.read(options.run)
    job = Job(options.part, run, options.family, seconds, progress, options.only, options.share)
    return 0 if PARTS[options.part](job) else 1


if __name__ == "__main__":
    sys.exit(main())
