"""Draws the stored results: one page, build/benchmarks/index.html, of pictures and all figures in tables.

    python -m benchmarks.plot [--results FOLDER] [--output FOLDER]

Reads benchmarks/results/*.jsonl and needs no GPU. The page stands alone.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gemm_tuning.table import best
from benchmarks.kit.results import RESULTS, ROOT
from benchmarks.plot.stored import Machine, Row, load
from benchmarks.tokenizers.report import shown
from bert_fast.bench.page import Html, joined, page, section, table, tagged
from bert_fast.bench.picture import Bar, Group, Picture, as_svg

Line = dict[str, Any]


def draw(results: Path, output: Path) -> Path:
    """Draws everything in `results`; returns the page."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / "index.html"
    path.write_text(render_page(load(results)), encoding="utf-8")
    return path


def render_page(machines: Sequence[Machine]) -> str:
    """The whole page."""
    return page(
        title="bert_fast: benchmarks",
        text="Drawn from stored results, the newest of every case. GB/s count the least bytes that the operation "
        "must move, the same for every contestant. Each case was checked for correct results before it was timed.",
        verdict=f"{len(machines)} machine{'s' if len(machines) != 1 else ''}",
        is_good=None,
        sections=[section(machine.name, joined(_parts(machine))) for machine in machines],
    )


def _parts(machine: Machine) -> Iterator[Html]:
    yield tagged("p", "; ".join(f"{key} {value}" for key, value in machine.facts.items()))
    if machine.ceilings:
        yield table(("ceiling", "rate", "us"), map(_ceiling, machine.ceilings), numeric=(1, 2))
    for line in machine.red:
        yield tagged("p", f"{line['case']} is wrong and was not timed: {line['error']}"[:400], "failed")
    for family, rows in machine.families().items():
        others = sorted({name for row in rows for name in row.speedups})
        groups = {
            name: {f"{row.label}  {row.mode}": row.speedups[name] for row in rows if name in row.speedups}
            for name in others
        }
        yield from _pictured(family, groups, _rows(rows, others))
    if machine.products:
        tiles = {name: ours for name, lines in machine.products.items() if (ours := best(lines)[1]) is not None}
        ratios = {name: line["speedup_over_library"] for name, line in tiles.items()}
        yield from _pictured(
            "matrix products", {"the library with separate kernels": ratios}, _products(machine.products)
        )
    if machine.simple:
        models = {case: r["ratio"] for case, r in machine.simple.items() if "transformers_tokens_per_s" in r}
        pieces = {case: r["ratio"] for case, r in machine.simple.items() if "torch_ms" in r}
        figures = table(("case", "figures"), map(_simple, machine.simple.values()))
        yield from _pictured("All figures", {"transformers": models, "PyTorch": pieces}, figures)
    if machine.tokenizers:
        named = (shown(line).partition(": ")[2] for line in machine.tokenizers.values())
        yield from _pictured("Tokenizers", {}, table(("case", "figures"), zip(machine.tokenizers, named, strict=True)))
    if machine.sanitizer:
        cells = [(s["tool"], s["outcome"], s["said"][:120]) for s in machine.sanitizer]
        yield from _pictured("compute-sanitizer", {}, table(("tool", "outcome", "said"), cells))


def _pictured(title: str, ratios: dict[str, dict[str, float]], figures: Html) -> Iterator[Html]:
    """A heading, a picture of how many times as fast bert_fast is as each of the others, and a table."""
    yield tagged("h3", title)
    groups = [
        Group(f"times as fast as {other}", tuple(Bar(*one) for one in of.items())) for other, of in ratios.items() if of
    ]
    if groups:
        yield Html(as_svg(Picture(title, tuple(groups), ("1x (grey) is the other side.",))))
    yield figures


def _ceiling(line: Line) -> tuple[str, ...]:
    if "gb_s" in line:
        what = f"copy, {line['bytes'] / 1e6:,.0f} MB read and written"
        return what, f"{line['gb_s']:,.0f} GB/s", f"{line['us']:,.1f}"
    return str(line["what"]), f"{line['tflop_s']:,.0f} TFLOP/s", f"{line['us']:,.1f}"


def _rows(rows: Iterable[Row], others: Sequence[str]) -> Html:
    names = "case, mode, us, 20 %, 80 %, GB/s, of equal copy, TFLOP/s, of ceiling, host us, commit"
    header = (*names.split(", "), *others)
    cells = []
    for row in rows:
        r = row.result
        tflop_s = f"{r['tflop_s']:,.0f}" if "tflop_s" in r else ""
        cells.append((
            row.label, row.mode, f"{r['us']:,.1f}", f"{r['us_p20']:,.1f}", f"{r['us_p80']:,.1f}", f"{r['gb_s']:,.0f}",
            f"{r['share_of_equal_copy']:.0%}", tflop_s, f"{row.share:.0%}" if row.share is not None else "",
            f"{r['host_us']:,.1f}", str(r.get("commit"))[:7],
            *(f"{row.speedups[name]:.2f}x" if name in row.speedups else "" for name in others),
        ))  # fmt: skip
    return table(header, cells, numeric=range(2, len(header)))


def _products(products: dict[str, list[Line]]) -> Html:
    """The library beside our best tile, as the table of the device takes it."""
    cells = []
    for name, lines in products.items():
        library, ours = best(lines)
        times = [f"{line['us']:,.1f}" if line is not None else "" for line in (library, ours)]
        found = (f"{ours['speedup_over_library']:.2f}x", ours["candidate"]) if ours is not None else ("", "")
        cells.append((name, *times, *found))
    return table(("product", "library us", "ours us", "speed-up", "our best tile"), cells, numeric=(1, 2, 3))


def _simple(line: Line) -> tuple[str, str]:
    hidden = {"case", "kind", "time", "processor", "threads", "python", "torch", "transformers"}
    said = {key: value for key, value in line.items() if key not in hidden and not isinstance(value, list)}
    return line["case"], ", ".join(f"{key} {value}" for key, value in said.items())


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
