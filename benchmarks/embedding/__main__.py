"""Measures embedding models on a CPU: contrastive, SPLADE's and late interaction's steps, and memory.

python -m benchmarks.embedding                     all of it; appends to results/cpu.jsonl, as `benchmarks.run` does
python -m benchmarks.embedding --tables [--write]  the tables of docs/embeddings.md; --write puts them there
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.embedding import report
from benchmarks.embedding.batch_memory import SIZES, run_memory
from benchmarks.embedding.contrastive import run_contrastive
from benchmarks.embedding.splade import run_splade, run_splade_memory
from benchmarks.embedding.late_interaction import run_late_interaction
from benchmarks.kit.results import RESULTS, read_lines
from benchmarks.kit.study import Job, Line, Study

# Name -> function of the number of rounds.
EMBEDDING_JOBS: dict[str, Callable[[int], dict[str, Any]]] = {
    "contrastive/minilm/32x8/1": partial(run_contrastive, 32, 8, 1),
    **{f"late_interaction/{size}": partial(run_late_interaction, size) for size in (32, 128)},
    **{f"batch_memory/{shape}": lambda rounds, shape=shape: run_memory(shape) for shape in SIZES},
    "splade/minilm/16/1": partial(run_splade, "minilm", 16, 1),
    "splade_memory/base": lambda rounds: run_splade_memory(),
}


def _jobs(options: Namespace) -> dict[str, Job]:
    def job(run: Callable[[int], Line]) -> Job:
        return lambda: [{"kind": "cpu", **run(options.rounds)}]

    return {name: job(run) for name, run in EMBEDDING_JOBS.items()}


STUDY = Study(
    "embedding",
    __doc__,
    RESULTS / "cpu.jsonl",
    _jobs,
    tables=lambda file: report.tables(list(read_lines(file))),
    page=report.PAGE,
    rounds=5,
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
