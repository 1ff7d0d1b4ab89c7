"""Times what a CPU can do: whole models beside transformers', single pieces, training runs, families' CPU shapes.

    python -m benchmarks.run                      everything; appends to results/cpu.jsonl
    python -m benchmarks.run --only minilm        cases whose name contains a text
    python -m benchmarks.run --list

The tokenizer and embedding models have commands of their own (`benchmarks/tokenizers`, `benchmarks/embedding`); what a
GPU can do is timed by `make gpu`.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.timing import check_case, time_case
from benchmarks.kit.results import RESULTS
from benchmarks.kit.study import Job, Line, Study
from benchmarks.models.forward_backward import run_case
from benchmarks.models.pieces import PIECES
from benchmarks.models.training_runs import CPU_RUNS
from benchmarks.registry import CASES, FAMILY_CASES, FUSED_CASES, kernel_cases

KERNEL_ROUNDS = 5  # of a kernel case, for one of a model


def _jobs(options: Namespace) -> dict[str, Job]:
    models = {
        case.name: partial(_stored, run_case, case, options.rounds, options.batches, options.gemm)
        for case in (*CASES, *FUSED_CASES, *FAMILY_CASES)
    }
    pieces = {name: partial(_stored, run, options.rounds) for name, run in (PIECES | CPU_RUNS).items()}
    kernels = {case.name: partial(check_and_time, case, KERNEL_ROUNDS * options.rounds) for case in kernel_cases("cpu")}
    return models | pieces | kernels


def _stored(run: Callable[..., Line], *arguments: object) -> list[Line]:
    return [{"kind": "cpu", **run(*arguments)}]


def check_and_time(case: KernelCase, rounds: int) -> Iterator[Line]:
    """Yields what `check_case` says and, only if that is green, the times of all providers, peers included.

    RuntimeError where it is not green.
    """
    device = torch.device("cpu")
    checked = check_case(case, device)
    yield {"kind": "verify", **checked}
    if not checked["ok"]:
        raise RuntimeError(checked["error"])
    providers = ("bert_fast", "eager")
    for result in time_case(case, device, providers, with_peers=True, rounds=rounds, kernels=checked["kernels"]):
        if "skipped" in result:
            yield {"kind": "skipped", "part": "time", "reason": result.pop("skipped"), **result}
        else:
            yield {"kind": "timing", **result}


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=2, help="batches of 32 in every round (whole models)")
    parser.add_argument("--gemm", choices=("default", "mkl"), default="default", help="library of the linear layers")


STUDY = Study(
    "run",
    __doc__,
    RESULTS / "cpu.jsonl",
    _jobs,
    rounds=5,
    what_rounds="counted rounds of every contestant",
    add_options=_add_options,
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
