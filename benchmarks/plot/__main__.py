"""Draws the stored results: PNG files and one page, index.html, that holds them all.

    python -m benchmarks.plot [--results FOLDER] [--output FOLDER]

Reads benchmarks/results/*.jsonl and writes to build/benchmarks. Needs matplotlib (extra `train`) and no GPU.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.kit.results import RESULTS, ROOT, slug
from benchmarks.plot.figures import family_figure, models_figure, pieces_figure, products_figure, styled
from benchmarks.plot.page import render_page
from benchmarks.plot.stored import Machine, load


def draw(results: Path, output: Path) -> Path:
    """Draws everything in `results` into `output`; returns the page."""
    output.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, list[tuple[str, Path]]] = {}
    machines = load(results)
    for machine in machines:
        pictures[machine.name] = []
        with styled():
            for title, figure in _figures(machine):
                path = output / f"{slug(machine.name)}-{slug(title)}.png"
                figure.savefig(path, dpi=110, bbox_inches="tight")
                pictures[machine.name].append((title, path))
    page = output / "index.html"
    page.write_text(render_page(machines, pictures), encoding="utf-8")
    return page


def _figures(machine: Machine) -> Iterator[tuple[str, Any]]:
    for family, rows in machine.families().items():
        yield family, family_figure(f"{family} on {machine.name}", rows)
    if any("transformers_tokens_per_s" in line for line in machine.simple.values()):
        yield "whole models", models_figure(machine.simple)
    if any("torch_ms" in line or "tokenizers_mb_per_s" in line for line in machine.simple.values()):
        yield "single pieces", pieces_figure(machine.simple)
    if machine.products:
        yield "matrix products", products_figure(machine.products)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with *.jsonl; default: %(default)s")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="default: %(default)s")
    options = parser.parse_args(arguments)
    if not any(options.results.glob("*.jsonl")):
        parser.error(f"no results (*.jsonl) in {options.results}")
    print(draw(options.results, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
