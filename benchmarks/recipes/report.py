"""Stored runs of the recipes as the tables of docs/recipes.md."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.recipes.cases import RECIPES, Recipe
from benchmarks.record import ROOT, read_lines

__all__ = ["PAGE", "page_with", "stored", "tables", "write_page"]

Line = dict[str, Any]
Lines = dict[tuple[str, str, int], Line]  # by recipe, side, seed

PAGE = ROOT / "docs" / "recipes.md"
SIDES = {"ours": "bert_fast", "theirs": "transformers"}
_MARKED = re.compile(r"(<!-- table: ([a-z0-9_]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def stored(path: Path) -> Lines:
    """The newest line of every recipe, side and seed; none where the file is not there."""
    lines = read_lines(path) if path.exists() else ()
    return {(line["case"], line["side"], line["seed"]): line for line in lines if line.get("kind") == "recipe"}


def tables(lines: Lines) -> dict[str, str]:
    """Markdown by name: "all", one line for each recipe and side, and one table for each recipe."""
    return {"all": _all(lines), "taken": _taken(lines)} | {
        recipe.name: _of_recipe(recipe, lines) for recipe in RECIPES.values()
    }


def page_with(page: str, made: dict[str, str]) -> str:
    """The page with what stands between its marks replaced.

    Raises:
        ValueError: a mark names no table.
    """

    def replaced(match: re.Match[str]) -> str:
        if match[2] not in made:
            raise ValueError(f"table: expected one of {', '.join(made)}, got {match[2]!r}")
        return f"{match[1]}{made[match[2]]}\n{match[3]}"

    return _MARKED.sub(replaced, page)


def write_page(lines: Lines, path: Path = PAGE) -> None:
    """Puts the tables into the page."""
    path.write_text(page_with(path.read_text(encoding="utf-8"), tables(lines)), encoding="utf-8")


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
    header = ("recipe", "figure", "bert_fast", "CPU minutes", "transformers", "CPU minutes")
    return _table(header, rows)


def _of_recipe(recipe: Recipe, lines: Lines) -> str:
    rows = []
    for side, name in SIDES.items():
        for run in runs_of(recipe, side, lines):
            figures = [f"{run['metrics'][metric]:.4g}" for metric in (*recipe.metrics, "loss")]
            padded = f"{run['padded_tokens']:,}" if "padded_tokens" in run else ""
            cost = (f"{run['tokens']:,}", padded, f"{run['cpu_seconds']:.0f}", f"{run['seconds']:.0f}")
            rows.append((name, str(run["seed"]), *figures, f"{run['steps']:,}", *cost, str(run["threads"])))
    header = ("", "seed", *recipe.metrics, "loss", "steps", "tokens", "with padding", "CPU s", "s", "threads")
    return _table(header, rows) if rows else "Nothing is stored."


def _taken(lines: Lines) -> str:
    """What the figures depend on."""
    facts = []
    for key in ("processor", "python", "torch", "transformers", "commit"):
        values = sorted({str(line[key]) for line in lines.values() if line.get(key) is not None})
        facts.append(f"{key} {', '.join(values)}")
    dates = sorted({line["time"][:10] for line in lines.values()})
    return f"Taken {', '.join(dates)}: {'; '.join(facts)}." if dates else "Nothing is stored."


def _spread(values: Sequence[float]) -> str:
    """The mean, with the standard deviation of several."""
    if not values:
        return ""
    return f"{mean(values):.4g}" + (f" ± {stdev(values):.2g} ({len(values)})" if len(values) > 1 else "")


def _minutes(runs: Sequence[Line]) -> str:
    return f"{mean(run['cpu_seconds'] for run in runs) / 60:.1f}" if runs else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
