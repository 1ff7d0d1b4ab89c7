"""Measures on a CPU, beside sentence-transformers: contrastive steps, SPLADE, late interaction, cross-encoders.

python -m benchmarks.embedding                     all; appends to results/cpu.jsonl, as `benchmarks.run` does
python -m benchmarks.embedding --tables [--write]  the tables of docs/embeddings.md; --write puts them there
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial

from benchmarks.embedding import report
from benchmarks.embedding.batch_memory import SIZES, run_memory
from benchmarks.embedding.block_diagonal import MIXES, name_of, run_mix
from benchmarks.embedding.contrastive import run_contrastive
from benchmarks.embedding.cross_encoders import CASES, run_case
from benchmarks.embedding.efficiency import MODELS, run_efficiency
from benchmarks.embedding.efficiency import name_of as name_of_model
from benchmarks.embedding.late_interaction import run_late_interaction
from benchmarks.embedding.splade import run_splade, run_splade_memory
from benchmarks.kit.results import RESULTS, read_lines
from benchmarks.kit.study import Job, Line, Study

# Name -> function of the number of rounds.
EMBEDDING_JOBS: dict[str, Callable[[int], Iterable[Line]]] = {
    "contrastive/minilm/32x8/1": lambda rounds: [run_contrastive(32, 8, 1, rounds)],
    **{
        f"late_interaction/{size}": lambda rounds, size=size: [run_late_interaction(size, rounds)] for size in (32, 128)
    },
    **{f"batch_memory/{shape}": lambda rounds, shape=shape: [run_memory(shape)] for shape in SIZES},
    "splade/minilm/16/1": lambda rounds: [run_splade("minilm", 16, 1, rounds)],
    "splade/base, 4 layers/8/1": lambda rounds: [run_splade("base", 8, 1, rounds, layers=4)],
    "splade_memory/base": lambda rounds: [run_splade_memory()],
    **{case.name: partial(run_case, case) for case in CASES},
    **{name_of_model(model): partial(run_efficiency, model) for model in MODELS},
    **{name_of(mix): lambda rounds, mix=mix: [run_mix(mix, rounds)] for mix in MIXES},
}


def _jobs(options: Namespace) -> dict[str, Job]:
    def job(run: Callable[[int], Iterable[Line]]) -> Job:
        return lambda: ({"kind": "cpu", **line} for line in run(options.rounds))

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
