"""Runs the recipes of `examples/`, ours and the same with transformers' Trainer; or shows what is stored.

    python -m benchmarks.recipes --prepare              files that the recipes read, into build/recipes/data
    python -m benchmarks.recipes                        everything: hours on two cores
    python -m benchmarks.recipes --only wnut17/theirs --rounds 1
    python -m benchmarks.recipes --tables [--write]     the tables of docs/recipes.md; --write puts them there

Results go to `benchmarks/results/recipes.jsonl`, a line for each recipe, side and seed. The sides are ours and
theirs. Threads: OMP_NUM_THREADS.
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import partial

from benchmarks.kit.results import RESULTS, ROOT
from benchmarks.kit.study import Job, Line, Study
from benchmarks.recipes import cases, data, report


def _run(recipe: cases.Recipe, side: str, seed: int) -> Iterator[Line]:
    data.prepare()
    os.chdir(ROOT)  # which the paths in examples/ are relative to
    flags = cases.flags_of(recipe, seed)
    if side == "ours":
        found = cases.our_run(recipe, flags)
    else:
        from benchmarks.recipes import theirs

        found = theirs.their_run(recipe, flags)
    yield {"kind": "recipe", "case": recipe.name, "side": side, "seed": seed, **found}


def _jobs(options: Namespace) -> dict[str, Job]:
    if options.prepare:
        data.prepare()
        return {}
    return {
        f"{recipe.name}/{side}/{seed}": partial(_run, recipe, side, seed)
        for recipe in cases.RECIPES.values() for seed in range(options.rounds) for side in recipe.sides
    }  # fmt: skip


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--prepare", action="store_true", help="make the files that the recipes read, and stop")


STUDY = Study(
    "recipes",
    __doc__,
    RESULTS / "recipes.jsonl",
    _jobs,
    tables=lambda file: report.tables(report.stored(file)),
    page=report.PAGE,
    rounds=3,
    what_rounds="seeds of a run, from 0 on",
    add_options=_add_options,
    shown=lambda line: json.dumps({name: line[name] for name in ("case", "side", "seed")} | line["metrics"]),
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
