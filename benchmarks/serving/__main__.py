"""Measures encoders as they are served on a CPU: bert_fast beside transformers, ONNX Runtime and OpenVINO.

    python -m benchmarks.serving --compile             half an hour; appends to results/serving.jsonl
    python -m benchmarks.serving --only MiniLM/one --dry-run
    python -m benchmarks.serving --only start          load time and memory alone, two minutes
    python -m benchmarks.serving --tables              the tables of docs/results.md, from the stored results

fp32, models of MiniLM's and BERT-base's form with random weights, real texts, all of them tokenized beforehand. Every
contestant is given the same padded batch and returns hidden states, which must agree; ours is given the same texts
without padding, too. Contestants take turns, wall time, medians; ratios are those within a round. Packages that are not
installed (`pip install bert_fast[serving]`) are named and left out.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from benchmarks.kit.study import Job, Line, Study
from benchmarks.serving import report
from benchmarks.serving.cases import CASES, MODELS, Case, cases
from benchmarks.serving.contestants import Run, contestants, model_of
from benchmarks.serving.speed import measure
from benchmarks.serving.start import measure_start

START_ROUNDS = 5
THREADS = (1, 2)
ROUNDS, ROUNDS_OF_BATCHES = 15, 5  # batches take long, and so vary little


@lru_cache(maxsize=1)
def _prepared(model: str, threads: int, compiles: bool) -> dict[str, Callable[[Case], Run]]:
    return contestants(model_of(MODELS[model][0]), threads, compiles)


def _speed(model: str, case_name: str, threads: int, options: Namespace) -> Iterator[Line]:
    """A line of the kind "serving"."""
    size, num_batches = MODELS[model]
    torch.set_num_threads(threads)
    case = cases(num_batches)[case_name]
    runs = {name: prepare(case) for name, prepare in _prepared(model, threads, options.compile).items()}
    rounds = options.rounds or (ROUNDS if case_name.startswith("one") else ROUNDS_OF_BATCHES)
    found = measure(runs, case, size, rounds)
    yield {"kind": "serving", "case": f"serving/{model}/{case_name}", "threads": threads, **found, "clock": "wall"}


def _start(model: str, options: Namespace) -> Iterator[Line]:
    """A line of the kind "serving_start", with the most threads alone."""
    threads = max(THREADS)
    found = measure_start(MODELS[model][0], threads, options.rounds or START_ROUNDS)
    yield {"kind": "serving_start", "case": f"serving/{model}/start", "threads": threads, **found, "clock": "wall"}


def _jobs(options: Namespace) -> dict[str, Job]:
    found: dict[str, Any] = {f"{model}/start": partial(_start, model, options) for model in MODELS}
    return found | {
        f"{model}/{case}, {threads} threads": partial(_speed, model, case, threads, options)
        for model in MODELS for threads in THREADS for case in CASES
    }  # fmt: skip


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--compile", action="store_true", help="torch.compile, too: some minutes more")


STUDY = Study(
    "serving",
    __doc__,
    report.PATH,
    _jobs,
    tables=lambda file: {"serving": report.render_speed(file), "serving_start": report.render_start(file)},
    what_rounds=f"counted rounds; default: {ROUNDS}, of batches {ROUNDS_OF_BATCHES}, of starts {START_ROUNDS}",
    add_options=_add_options,
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
