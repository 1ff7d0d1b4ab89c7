"""Runs benchmark cases in this process, prints a line for each, appends JSON lines to `benchmarks/results/`.

    python -m benchmarks.run                      every case that this machine's device can run
    python -m benchmarks.run --only minilm        cases whose name contains a text
    python -m benchmarks.run --list

Without a GPU these are whole models, single components, the tokenizer (`benchmarks/tokenizers`) and the kernel
families' CPU shapes. With one they are the kernel cases at full BERT shapes: `make gpu` does the same and more, within
a budget.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.embedding.__main__ import EMBEDDING_JOBS
from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.ceilings import ceilings_of, measure_ceilings
from benchmarks.kernels.timing import PROVIDERS, ROUNDS, Ceilings, check_case, time_case
from benchmarks.kit.results import RESULTS, Recorder, cpu_environment, gpu_environment, slug
from benchmarks.models.forward_backward import run_case
from benchmarks.models.pieces import PIECES
from benchmarks.models.training_runs import CPU_RUNS
from benchmarks.registry import CASES, FAMILY_CASES, FUSED_CASES, kernel_cases
from benchmarks.tokenizers.jobs import tokenizer_environment, tokenizer_jobs

Job = Callable[[], Iterable[dict[str, Any]]]


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if a kernel case is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run cases whose name contains this text")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of every contestant (on a CPU)")
    parser.add_argument("--batches", type=int, default=2, help="batches of 32 in every round (whole models)")
    parser.add_argument("--gemm", choices=("default", "mkl"), default="default", help="library of the linear layers")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--dry-run", action="store_true", help="do not store the results")
    options = parser.parse_args(arguments)
    is_gpu = torch.cuda.is_available()
    jobs = _gpu_jobs() if is_gpu else _cpu_jobs(options.rounds, options.batches, options.gemm)
    jobs = {name: job for name, job in jobs.items() if options.only in name}
    if options.list:
        print("\n".join(jobs))
        return 0
    if is_gpu:
        shared = gpu_environment()
        recorder = Recorder(RESULTS / f"{slug(shared['gpu'])}.jsonl", shared)
    else:
        recorder = Recorder(RESULTS / "cpu.jsonl", cpu_environment())
    of_tokenizers = Recorder(RESULTS / "tokenizers.jsonl", tokenizer_environment())
    wrong = 0
    for name, job in jobs.items():
        for result in job():
            shown = {key: value for key, value in result.items() if key != "case" and not isinstance(value, list)}
            print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
            wrong += result.get("ok") is False
            if not options.dry_run:
                target = of_tokenizers if name.startswith("tokenizer/") else recorder
                target.write(**({"kind": "cpu"} | result))
    return 1 if wrong else 0


def _gpu_jobs() -> dict[str, Job]:
    device = torch.device("cuda")
    measured: list[dict[str, Any]] = []

    def ceilings() -> Iterable[dict[str, Any]]:
        measured.extend({"kind": "ceiling", **result} for result in measure_ceilings(device))
        return measured

    def kernel(case: KernelCase) -> Iterable[dict[str, Any]]:
        return check_and_time(case, device, PROVIDERS, ROUNDS, ceilings_of(measured or list(ceilings())))

    return {"ceilings": ceilings} | {case.name: (lambda case=case: kernel(case)) for case in kernel_cases("gpu")}


def _cpu_jobs(rounds: int, batches: int, gemm: str) -> dict[str, Job]:
    device = torch.device("cpu")
    jobs: dict[str, Job] = {
        case.name: (lambda case=case: [run_case(case, rounds, batches, gemm)])
        for case in (*CASES, *FUSED_CASES, *FAMILY_CASES)
    }
    jobs |= {name: (lambda run=run: [run(rounds)]) for name, run in PIECES.items()}
    jobs |= {name: (lambda run=run: [run(rounds)]) for name, run in CPU_RUNS.items()}
    jobs |= {name: (lambda run=run: run(rounds)) for name, run in EMBEDDING_JOBS.items()}
    jobs |= tokenizer_jobs()
    return jobs | {
        case.name: (lambda case=case: check_and_time(case, device, ("bert_fast", "eager"), rounds * 5))
        for case in kernel_cases("cpu")
    }


def check_and_time(
    case: KernelCase, device: torch.device, providers: Iterable[str], rounds: int, ceilings: Ceilings | None = None
) -> Iterable[dict[str, Any]]:
    """Yields what `check_case` says and, only if that is green, the times of all providers, peers included."""
    checked = check_case(case, device)
    yield {"kind": "verify", **checked}
    if not checked["ok"]:
        return
    for result in time_case(
        case, device, providers, with_peers=True, rounds=rounds, ceilings=ceilings, kernels=checked["kernels"]
    ):
        if "skipped" in result:
            yield {"kind": "skipped", "part": "time", "reason": result.pop("skipped"), **result}
        else:
            yield {"kind": "timing", **result}


if __name__ == "__main__":
    sys.exit(main())
