"""Stored runs of the recipes as the tables of docs/recipes.md."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.kit.markdown import NOTHING, facts, table
from benchmarks.kit.results import ROOT, read_lines
from benchmarks.recipes.cases import RECIPES, Recipe

Line = dict[str, Any]
Lines = dict[tuple[str, str, int], Line]  # by recipe, side, seed

PAGE = ROOT / "docs" / "recipes.md"
SIDES = {"ours": "bert_fast", "theirs": "transformers"}


def stored(path: Path) -> Lines:
    """The newest line of every side and seed of the recipes that there are; none where the file is not there."""
    lines = [line for line in read_lines(path) if line.get("kind") == "recipe"] if path.exists() else ()
    return {(line["case"], line["side"], line["seed"]): line for line in lines if line["case"] in RECIPES}


def tables(lines: Lines) -> dict[str, str]:
    """Markdown by name: "all", one line for each recipe and side, and one table for each recipe."""
    return {"all": _all(lines), "taken": _taken(lines)} | {
        recipe.name: _of_recipe(recipe, lines) for recipe in RECIPES.values()
    }


def runs_of(recipe: Recipe, side: str, lines: Lines) -> list[Line]:
    """The stored runs of one side, by seed."""
    return [lines[key] for key in sorted(lines) if key[:2] == (recipe.name, side)]


def _all(lines: Lines) -> str:
    rows = []
    for recipe in RECIPES.values():
        metric = recipe.metrics[0]
        cells = []
        for side in SIDES:
            runs = runs_of(recipe, side, lines)
            cells += [_spread([run["metrics"][metric] for run in runs]), _minutes(runs)]
        rows.append((f"[{recipe.name}](#{recipe.name})", metric, *cells))
    header = ("recipe", "figure", "bert_fast", "CPU minutes", "other side", "CPU minutes")
    return table(header, rows)


def _of_recipe(recipe: Recipe, lines: Lines) -> str:
    """A row for each side, of the runs with all its seeds."""
    rows = []
    columns = (*recipe.metrics, "loss")
    for side, name in SIDES.items():
        if runs := runs_of(recipe, side, lines):
            figures = [_spread([run["metrics"][metric] for run in runs]) for metric in columns]
            padded = f"{mean(run['padded_tokens'] for run in runs):,.0f}" if "padded_tokens" in runs[0] else ""
            cost = (f"{mean(run['tokens'] for run in runs):,.0f}", padded)
            seconds = f"{mean(run['cpu_seconds'] for run in runs):.0f}"
            rows.append((name, *figures, f"{runs[0]['steps']:,}", *cost, seconds))
    header = ("", *columns, "steps", "tokens", "with padding", "CPU s")
    return table(header, rows) if rows else NOTHING


def _taken(lines: Lines) -> str:
    """What the figures depend on."""
    found = facts(lines.values(), ("processor", "python", "torch", "transformers", "commit"))
    dates = sorted({line["time"][:10] for line in lines.values()})
    return f"Taken {', '.join(dates)}: {'; '.join(map(' '.join, found.items()))}." if dates else NOTHING


def _spread(values: Sequence[float]) -> str:
    """The mean, with the standard deviation of several."""
    if not values:
        return ""
    return f"{mean(values):.4g}" + (f" ± {stdev(values):.2g} ({len(values)})" if len(values) > 1 else "")


def _minutes(runs: Sequence[Line]) -> str:
    return f"{mean(run['cpu_seconds'] for run in runs) / 60:.1f}" if runs else ""
