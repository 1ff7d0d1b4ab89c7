"""One HTML page of results that stands alone: pictures inside, figures in tables."""

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gemm_tuning.table import best
from benchmarks.plot.stored import Machine, Row
from benchmarks.tokenizers.report import shown

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { border-bottom: 2px solid #1b6ca8; padding-bottom: .2rem; margin-top: 3rem }
h3 { margin-bottom: .3rem } img { max-width: 100%; height: auto } .facts { color: #555 } .bad { color: #b00020 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 13px }
td, th { border-bottom: 1px solid #ddd; padding: .15rem .7rem .15rem 0; text-align: right; white-space: nowrap }
td:first-child, th:first-child, table.text td, table.text th { text-align: left; white-space: normal }
"""


def render_page(machines: Sequence[Machine], pictures: dict[str, list[tuple[str, Path]]]) -> str:
    """The whole page."""
    sections = "".join(_section(machine, pictures[machine.name]) for machine in machines)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>bert_fast: benchmarks</title>'
        f"<style>{STYLE}</style></head><body><h1>bert_fast: benchmarks</h1>"
        "<p>Drawn from stored results, the newest of every case. GB/s count the bytes that the operation must move at "
        "least, whoever runs it; a case is timed only after its results were found right.</p>"
        f"{sections}</body></html>\n"
    )


def _section(machine: Machine, pictures: Sequence[tuple[str, Path]]) -> str:
    facts = "; ".join(f"{key} {value}" for key, value in machine.facts.items())
    parts = [f"<h2>{html.escape(machine.name)}</h2>", f'<p class="facts">{html.escape(facts)}</p>']
    if machine.ceilings:
        parts.append(_table(("ceiling", "rate", "us"), [_ceiling(line) for line in machine.ceilings]))
    for line in machine.red:
        text = f"{line['case']} is wrong and was not timed: {line['error']}"
        parts.append(f'<p class="bad">{html.escape(text[:400])}</p>')
    families = machine.families()
    for title, path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(f"<h3>{html.escape(title)}</h3>")
        parts.append(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">')
        if title in families:
            parts.append(_rows(families[title]))
        elif path.stem.endswith("matrix-products"):
            parts.append(_products(machine.products))
    if machine.simple:
        parts.append(
            "<h3>All figures</h3>" + _table(("case", "figures"), map(_simple, machine.simple.values()), "text")
        )
    if machine.tokenizers:
        figures = (shown(line).partition(": ")[2] for line in machine.tokenizers.values())
        rows = zip(machine.tokenizers, figures, strict=True)
        parts.append("<h3>Tokenizers</h3>" + _table(("case", "figures"), rows, "text"))
    if machine.sanitizer:
        cells = [(f"{s['family']} {s['tool']}", s["outcome"], s["said"][:120]) for s in machine.sanitizer]
        parts.append("<h3>compute-sanitizer</h3>" + _table(("kernels", "outcome", "said"), cells, "text"))
    return "".join(parts)


def _ceiling(line: dict[str, Any]) -> tuple[str, ...]:
    if "gb_s" in line:
        return (
            f"copy, {line['bytes'] / 1e6:,.0f} MB read and written",
            f"{line['gb_s']:,.0f} GB/s",
            f"{line['us']:,.1f}",
        )
    return str(line["what"]), f"{line['tflop_s']:,.0f} TFLOP/s", f"{line['us']:,.1f}"


def _rows(rows: Iterable[Row]) -> str:
    rows = list(rows)
    others = sorted({name for row in rows for name in row.speedups})
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
    return _table(header, cells)


def _products(products: dict[str, list[dict[str, Any]]]) -> str:
    """The library beside our best tile, as the table of the device takes it."""
    cells = []
    for name, lines in products.items():
        library, ours = best(lines)
        times = [f"{line['us']:,.1f}" if line is not None else "" for line in (library, ours)]
        found = (f"{ours['speedup_over_library']:.2f}x", ours["candidate"]) if ours is not None else ("", "")
        cells.append((name, *times, *found))
    return _table(("product", "library us", "ours us", "speed-up", "our best tile"), cells)


def _simple(line: dict[str, Any]) -> tuple[str, str]:
    hidden = {"case", "kind", "time", "processor", "threads", "python", "torch", "transformers"}
    shown = {key: value for key, value in line.items() if key not in hidden and not isinstance(value, list)}
    return line["case"], ", ".join(f"{key} {value}" for key, value in shown.items())


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'
