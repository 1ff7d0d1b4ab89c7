"""Runs the recipes of `examples/`, ours and the same with transformers' Trainer; or shows what is stored.

    python -m benchmarks.recipes --prepare              files that the recipes read, into build/recipes/data
    python -m benchmarks.recipes                        everything: hours on two cores
    python -m benchmarks.recipes --only wnut17 --side theirs --seeds 1
    python -m benchmarks.recipes --tables [--write]     the tables of docs/recipes.md; --write puts them there

Results go to `benchmarks/results/recipes.jsonl`, a line for each recipe, side and seed. Threads: OMP_NUM_THREADS.
"""

import argparse
import json
import os
import sys

from benchmarks.kit.markdown import show_tables
from benchmarks.kit.record import RESULTS, ROOT, Recorder, cpu_environment
from benchmarks.recipes import report

FILE = "recipes.jsonl"


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="run this recipe")
    parser.add_argument(
        "--side",
        choices=["ours", "theirs", "masked"],
        help="run one side; masked: theirs, padding kept out of the softmax",
    )
    parser.add_argument("--seeds", type=int, default=3, help="of a run, upwards from the first; default: %(default)s")
    parser.add_argument("--first-seed", type=int, default=0, help="default: 0")
    parser.add_argument("--prepare", action="store_true", help="make the files that the recipes read, and stop")
    parser.add_argument("--tables", action="store_true", help="print all tables from stored results and stop")
    parser.add_argument("--write", action="store_true", help="with --tables: put them into docs/recipes.md")
    options = parser.parse_args(arguments)
    if options.tables:
        lines = report.stored(RESULTS / FILE)
        show_tables(report.tables(lines), report.PAGE, options.write)
        return 0

    from benchmarks.recipes.cases import RECIPES, flags_of, our_run
    from benchmarks.recipes.data import prepare

    if options.only is not None and options.only not in RECIPES:
        parser.error(f"--only: expected one of {', '.join(RECIPES)}, got {options.only}")
    if options.seeds < 1:
        parser.error(f"--seeds: expected at least 1, got {options.seeds}")
    chosen = [recipe for recipe in RECIPES.values() if options.only in (None, recipe.name)]
    if options.side is not None and not any(options.side in recipe.sides for recipe in chosen):
        parser.error(f"--side: {options.only} is run by {', '.join(chosen[0].sides)}, got {options.side}")
    prepare()
    if options.prepare:
        return 0
    os.chdir(ROOT)  # which the paths in examples/ are relative to
    recorder = Recorder(RESULTS / FILE, cpu_environment())
    for recipe in chosen:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for side in recipe.sides:
                if options.side not in (None, side):
                    continue
                flags = flags_of(recipe, seed)
                if side == "ours":
                    found = our_run(recipe, flags)
                else:
                    from benchmarks.recipes.theirs import their_run

                    found = their_run(recipe, flags, masks_padding=side == "masked")
                line = recorder.write("recipe", case=recipe.name, side=side, seed=seed, **found)
                print(json.dumps({"case": recipe.name, "side": side, "seed": seed} | line["metrics"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
