"""The parts of `make gpu` that run in a process of their own; `benchmarks/gpu.py` starts them within their budgets.

    python -m benchmarks.parts PART --run FILE [--family NAME] [--seconds N]

    ceilings   copy bandwidth and bf16 matrix rate
    verify     every case of a family against fp64, and twice, bit for bit
    compile    torch.compile of every verified case, into the compiler's cache on disk
    prepare    Triton's compilation of what `gemm` and `tiles` time, into its cache on disk, in several processes
    time       bert_fast, eager and compiled in turn, cases that verified green only
    peers      bert_fast and other libraries in turn, for the cases of all families that have any
    gemm       the library's matrix products and ours in turn, with every tile; what a device's table is made from
    tiles      attention's tiles and alternatives in turn
    steps      whole steps of pre-training against transformers', with MFU
    runs       whole training runs by our Trainer: tokens/s, MFU, memory, waiting for batches
    models     whole models against transformers, where the lengths of their texts are there

FILE holds what `Run` holds, as JSON. A part stops by itself when its seconds are used up and records what it left out;
should it hang, it is killed, and what it had recorded stays.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.budget import Seconds
from benchmarks.record import Recorder
from benchmarks.registry import CASES, Case, kernel_cases

if TYPE_CHECKING:
    from benchmarks.case import KernelCase
    from benchmarks.gemm_tuning import Product
    from benchmarks.tiles import Group
    from benchmarks.training_runs import RunCase
    from benchmarks.training_steps import StepCase

__all__ = ["PARTS", "Run"]


@dataclass(frozen=True)
class Run:
    """One run of `make gpu`: where results go, what stands in every line, and on what device which cases run.

    device: "cuda", or "cpu" for tests; size: of the cases, as `registry.kernel_cases` has it.
    compile_backend: of torch.compile; rounds: counted rounds of every contestant, None for the usual number.
    """

    results: str
    shared: dict[str, Any]
    device: str = "cuda"
    size: str = "gpu"
    compile_backend: str = "inductor"
    rounds: int | None = None

    @classmethod
    def read(cls, path: Path) -> "Run":
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.__dict__))

    @property
    def recorder(self) -> Recorder:
        return Recorder(Path(self.results), self.shared)


def ceilings(run: Run, family: str, seconds: float) -> bool:
    """Every size gets a line; returns whether all were measured."""
    import torch

    from benchmarks.ceilings import measure_ceilings

    small = {"copy_bytes": (10**6,), "matmul_size": 64, "rounds": 3} if run.size == "small" else {}
    for result in measure_ceilings(torch.device(run.device), **small):  # type: ignore[arg-type]
        run.recorder.write("ceiling", **result)
        rate = f"{result['gb_s']} GB/s" if "gb_s" in result else f"{result['tflop_s']} TFLOP/s"
        _say(f"{result['what']} {result.get('bytes', '')}: {rate}")
    return True


def verify(run: Run, family: str, seconds: float) -> bool:
    """Returns whether all cases are right."""
    import torch

    from benchmarks.kernels import check_case

    recorder, all_right = run.recorder, True
    for case in Seconds(seconds).of(kernel_cases(run.size, [family]), _left_out(run, "verify")):
        start = time.monotonic()
        result = check_case(case, torch.device(run.device))
        recorder.write("verify", **result, seconds=round(time.monotonic() - start, 2))
        all_right &= result["ok"]
        _say(f"{case.name}: {'green' if result['ok'] else 'RED ' + result['error']}")
    return all_right


def compile_(run: Run, family: str, seconds: float) -> bool:
    """Compiles forward and backward of the eager functions by running them; a failure is recorded, not an error."""
    import torch

    from benchmarks.kernels import compile_eager, gradients_of

    recorder = run.recorder
    for case in Seconds(seconds).of(list(_green(run, family)), _left_out(run, "compile")):
        start, error = time.monotonic(), None
        try:
            torch.manual_seed(0)
            problem = case.make(torch.device(run.device))
            inputs, upstream = problem.arguments_of("compiled")
            output = compile_eager(problem.eager, run.compile_backend)(*inputs)
            if upstream is not None:
                gradients_of(output, inputs, upstream, allow_unused=True)
        except Exception as failure:  # the compiler's failure is its result
            error = f"{type(failure).__name__}: {str(failure)[:500]}"
        took = round(time.monotonic() - start, 2)
        recorder.write("compile", family=family, case=case.name, ok=error is None, error=error, seconds=took)
        _say(f"{case.name}: {error or f'compiled in {took} s'}")
    return True


def time_(run: Run, family: str, seconds: float) -> bool:
    """Times what verified green; what `compile` did not get done in this run is timed without the compiled version."""
    compiled = {line["case"] for line in run.recorder.of_this_run("compile") if line["ok"]}
    for case in Seconds(seconds).of(_most_telling_first(_green(run, family, report=True)), _left_out(run, "time")):
        providers = ["bert_fast", "eager"]
        if case.name in compiled:
            providers.append("compiled")
        else:
            _skip(run, "time", case, "compiled", "not compiled in this run")
        _time(run, case, providers, with_peers=False)
    return True


def _most_telling_first(cases: "Iterable[KernelCase]") -> "list[KernelCase]":
    """16,384 tokens, the size that goals are set for, first: should time run out, the other sizes are missing."""
    return sorted(cases, key=lambda case: not case.shape.startswith("16384"))


def peers(run: Run, family: str, seconds: float) -> bool:
    """Times bert_fast again, in turn with other libraries, for the cases of all families that have any here."""
    timed = run.recorder.of_this_run("timing")
    with_peers = {line["case"] for line in timed if line.get("peers")}
    families = sorted({line["family"] for line in timed if line["case"] in with_peers})
    if not families:
        _say("no other library with such kernels imports here")
        return True
    cases = [case for name in families for case in _green(run, name) if case.name in with_peers]
    for case in Seconds(seconds).of(_most_telling_first(cases), _left_out(run, "peers")):
        _time(run, case, ["bert_fast"], with_peers=True)
    return True


def prepare(run: Run, family: str, seconds: float) -> bool:
    """Compiles ahead of parts that time; what is not done in time, they compile. family: "steps", or "" for the rest.

    Of matrix products and attention's tiles, in processes side by side.
    """
    import torch

    from benchmarks import gemm_tuning, tiles

    if family == "steps":
        return _prepare_steps(run, seconds)
    if run.device != "cuda":
        _say("Triton's kernels need a GPU: nothing to compile")
        return True
    jobs: list[tuple[Any, ...]] = [("gemm", *job) for job in gemm_tuning.preparations(torch.device(run.device))]
    jobs += [("tiles", group) for group in tiles.GROUPS]
    count = min(8, max(1, (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        for error in pool.map(_prepare, jobs, [run.device] * len(jobs)):
            if error is not None:  # the part meets it again, and records it
                _say(error)
    return True


def _prepare_steps(run: Run, seconds: float) -> bool:
    """Leaves compiled training steps in torch.compile's cache on disk."""
    import torch

    from benchmarks import training_steps

    device = torch.device(run.device)
    for case in Seconds(seconds).of(_step_cases(run, "compiled"), lambda case, reason: _skip_step(run, case, reason)):
        start = time.monotonic()
        try:
            training_steps.compile_step(case, device, run.compile_backend)
            _say(f"{case.name}: compiled in {time.monotonic() - start:.0f} s")
        except Exception as failure:  # `compiled` meets it again, and records it
            _say(f"{case.name}: {type(failure).__name__}: {str(failure)[:300]}")
    return True


def _prepare(job: tuple[Any, ...], device: str) -> str | None:
    import torch

    from benchmarks import gemm_tuning, tiles

    part, what, *options = job
    try:
        (gemm_tuning if part == "gemm" else tiles).prepare(what, *options, torch.device(device))
    except Exception as failure:
        return f"{part} {what.name}: {type(failure).__name__}: {str(failure)[:300]}"
    return None


def gemm(run: Run, family: str, seconds: float) -> bool:
    """Times matrix products; a line of kind "gemm" for the library and for each tile; family: "" or "specialized"."""
    import torch

    from benchmarks import gemm_tuning

    def leave_out(product: "Product", reason: str) -> None:
        run.recorder.write("skipped", part="gemm", family="gemm", case=product.name, provider=None, reason=reason)
        _say(f"{product.name}: left out: {reason}")

    products = gemm_tuning.SMALL_PRODUCTS if run.size == "small" else gemm_tuning.PRODUCTS
    gemm_tuning.time_products(
        Seconds(seconds).of(list(products), leave_out), torch.device(run.device), run.rounds or gemm_tuning.ROUNDS,
        lambda result: run.recorder.write("gemm", **result), leave_out, family == "specialized",
    )  # fmt: skip
    return True


def tiles_(run: Run, family: str, seconds: float) -> bool:
    """Times attention's tiles; a line of kind "tiles" for each candidate."""
    import torch

    from benchmarks.tiles import GROUPS, time_group

    def leave_out(group: "Group", reason: str) -> None:
        run.recorder.write("skipped", part="tiles", family="attention", case=group.name, provider=None, reason=reason)

    if not any(line["ok"] for line in run.recorder.of_this_run("verify") if line["family"] == "attention"):
        _say("no case of attention verified green in this run: not timed")
        return True
    for group in Seconds(seconds).of(list(GROUPS), leave_out):
        try:
            results = list(time_group(group, torch.device(run.device)))
        except Exception as failure:  # what ships does not run, or memory is short
            leave_out(group, f"{type(failure).__name__}: {str(failure)[:500]}")
            continue
        for result in results:
            run.recorder.write("tiles", family="attention", **result)
            _say(f"{group.name:24} {result['candidate']:28} {result.get('us', result.get('error'))}")
    return True


def steps(run: Run, family: str, seconds: float) -> bool:
    """Times whole training steps; family: "compiled" for transformers' under torch.compile, "" for all others."""
    import torch

    from benchmarks import training_steps
    from benchmarks.ceilings import ceilings_of

    ceiling = ceilings_of(run.recorder.of_this_run("ceiling")).matmul_tflop_s
    for case in Seconds(seconds).of(_step_cases(run, family), lambda case, reason: _skip_step(run, case, reason)):
        for result in training_steps.time_steps(
            case, torch.device(run.device), rounds=run.rounds or 8, matmul_tflop_s=ceiling,
            compile_backend=run.compile_backend, is_compiled=family == "compiled",
        ):  # fmt: skip
            if "skipped" in result:
                _skip_step(run, case, result["skipped"], result["provider"])
                continue
            run.recorder.write("step", case=case.name, **result)
            _say(
                f"{case.name:40} {result['provider']:9} {result['ms']:9.2f} ms  {result['sequences_per_s']:9.1f}"
                f" sequences/s  MFU {result['mfu']}  bert_fast {result['bert_fast_speedup']}x"
            )
    return True


def _step_cases(run: Run, family: str) -> "list[StepCase]":
    from benchmarks import training_steps

    if run.size == "small":
        return list(training_steps.SMALL_CASES)
    return [case for case in training_steps.CASES if family != "compiled" or case.is_compiled]


def _skip_step(run: Run, case: "StepCase", reason: str, provider: str | None = None) -> None:
    run.recorder.write("skipped", part="steps", family=None, case=case.name, provider=provider, reason=reason)
    _say(f"{case.name}{f' {provider}' if provider else ''}: left out: {reason}")


def runs(run: Run, family: str, seconds: float) -> bool:
    """Times whole training runs; a line of kind "run" for each."""
    from benchmarks import training_runs
    from benchmarks.ceilings import ceilings_of

    def leave_out(case: "RunCase", reason: str) -> None:
        run.recorder.write("skipped", part="runs", family=None, case=case.name, provider=None, reason=reason)
        _say(f"{case.name}: left out: {reason}")

    ceiling = ceilings_of(run.recorder.of_this_run("ceiling")).matmul_tflop_s
    cases = training_runs.SMALL_CASES if run.size == "small" else training_runs.CASES
    for case in Seconds(seconds).of(list(cases), leave_out):
        try:
            results = list(training_runs.time_run(case))
        except Exception as failure:  # memory is short, say: the next case may fit
            leave_out(case, f"{type(failure).__name__}: {str(failure)[:300]}")
            continue
        for result in results:
            mfu = round(result["tflop_s"] / ceiling, 4) if ceiling else None
            run.recorder.write("run", case=case.name, mfu=mfu, matmul_ceiling_tflop_s=ceiling, **result)
            _say(f"{case.name:40} {result['tokens_per_s']:12,.0f} tokens/s  MFU {mfu}  waits {result['wait_share']}")
    return True


def models(run: Run, family: str, seconds: float) -> bool:
    """Times the whole-model cases, each side in eager mode; a case without the lengths of its texts is left out."""
    import torch

    from benchmarks.models import run_case

    cases = list(CASES)
    if run.size == "small":
        cases = [replace(case, batch_size=1) for case in cases if case.shape == "minilm" and case.lengths == "full"]
    for case in Seconds(seconds).of(cases, lambda case, reason: _skip_model(run, case, reason)):
        try:
            result = run_case(case, run.rounds or 10, 1, device=torch.device(run.device))
        except Exception as failure:  # most likely a file that is not there
            _skip_model(run, case, f"{type(failure).__name__}: {str(failure)[:500]}")
            continue
        run.recorder.write("model", **result)
        _say(f"{case.name}: {result['bert_fast_tokens_per_s']} real tokens/s, {result['ratio']}x transformers")
    return True


def _skip_model(run: Run, case: Case, reason: str) -> None:
    run.recorder.write("skipped", part="models", family=None, case=case.name, provider=None, reason=reason)
    _say(f"{case.name}: left out: {reason}")


def _green(run: Run, family: str, report: bool = False) -> "Iterator[KernelCase]":
    """The family's cases that verified green in this run; with `report` the others are recorded as left out."""
    checked = {line["case"]: line["ok"] for line in run.recorder.of_this_run("verify")}
    for case in kernel_cases(run.size, [family]):
        if checked.get(case.name):
            yield case
        elif report:
            reason = "verified red: not timed" if case.name in checked else "not verified in this run: not timed"
            _skip(run, "time", case, None, reason)


def _time(run: Run, case: "KernelCase", providers: list[str], with_peers: bool) -> None:
    import torch

    from benchmarks.ceilings import ceilings_of
    from benchmarks.kernels import ROUNDS, time_case

    recorder, part = run.recorder, "peers" if with_peers else "time"
    kernels = {line["case"]: line["kernels"] for line in recorder.of_this_run("verify")}[case.name]
    try:
        for result in time_case(
            case, torch.device(run.device), providers, with_peers=with_peers, rounds=run.rounds or ROUNDS,
            ceilings=ceilings_of(recorder.of_this_run("ceiling")), compile_backend=run.compile_backend,
        ):  # fmt: skip
            if "skipped" in result:
                _skip(run, part, case, result["provider"], result["skipped"])
                continue
            if result["provider"] == "bert_fast":  # others launch nothing of ours
                result |= {"verified": True, "kernels": kernels}
            recorder.write("timing", family=case.family, case=case.name, **result)
            _show(case, result)
    except Exception as failure:  # memory of the device, say: the next case may be smaller
        _skip(run, part, case, None, f"{type(failure).__name__}: {str(failure)[:500]}")


def _show(case: "KernelCase", result: dict[str, Any]) -> None:
    share = result["share_of_copy_ceiling"]
    rate = f"{result['gb_s']:7.1f} GB/s" + (f" ({share:.0%} of copy)" if share else "")
    if "tflop_s" in result:
        rate += f", {result['tflop_s']:6.1f} TFLOP/s"
    faster = f", bert_fast {result['bert_fast_speedup']}x" if "bert_fast_speedup" in result else ""
    _say(f"{case.name} {result['mode']:4} {result['provider']:9} {result['us']:9.1f} us {rate}{faster}")


def _left_out(run: Run, part: str) -> "Callable[[KernelCase, str], None]":
    return lambda case, reason: _skip(run, part, case, None, reason)


def _skip(run: Run, part: str, case: "KernelCase", provider: str | None, reason: str) -> None:
    run.recorder.write("skipped", part=part, family=case.family, case=case.name, provider=provider, reason=reason)
    _say(f"{case.name}{f' {provider}' if provider else ''}: left out: {reason}")


def _say(text: str) -> None:
    print(text, flush=True)


PARTS: dict[str, Callable[[Run, str, float], bool]] = {
    "ceilings": ceilings,
    "verify": verify,
    "compile": compile_,
    "prepare": prepare,
    "time": time_,
    "peers": peers,
    "gemm": gemm,
    "tiles": tiles_,
    "steps": steps,
    "runs": runs,
    "models": models,
}


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--family", default="")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args(arguments)
    return 0 if PARTS[options.part](Run.read(options.run), options.family, options.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
