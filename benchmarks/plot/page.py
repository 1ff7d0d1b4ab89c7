"""One HTML page of results that stands alone: pictures inside, figures in tables."""

import base64
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gemm_tuning.table import best
from benchmarks.plot.stored import Machine, Row
from benchmarks.tokenizers.report import shown
from bert_fast.bench.page import Html, inline, joined, page, section, table, tagged


def render_page(machines: Sequence[Machine], pictures: dict[str, list[tuple[str, Path]]]) -> str:
    """The whole page."""
    return page(
        title="bert_fast: benchmarks",
        text="Drawn from stored results, the newest of every case. GB/s count the bytes that the operation must move "
        "at least, whoever runs it; a case is timed only after its results were found right.",
        verdict=f"{len(machines)} machine{'s' if len(machines) != 1 else ''}",
        is_good=None,
        sections=[section(machine.name, joined(_parts(machine, pictures[machine.name]))) for machine in machines],
    )


def _parts(machine: Machine, pictures: Sequence[tuple[str, Path]]) -> Iterator[str]:
    yield tagged("p", "; ".join(f"{key} {value}" for key, value in machine.facts.items()))
    if machine.ceilings:
        yield table(("ceiling", "rate", "us"), [_ceiling(line) for line in machine.ceilings], numeric=(1, 2))
    for line in machine.red:
        yield tagged("p", f"{line['case']} is wrong and was not timed: {line['error']}"[:400], "failed")
    families = machine.families()
    for title, path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        yield tagged("h3", title)
        yield Html(f'<img style="max-width: 100%" alt="{inline(title)}" src="data:image/png;base64,{data}">')
        if title in families:
            yield _rows(families[title])
        elif path.stem.endswith("matrix-products"):
            yield _products(machine.products)
    if machine.simple:
        yield tagged("h3", "All figures")
        yield table(("case", "figures"), map(_simple, machine.simple.values()))
    if machine.tokenizers:
        figures = (shown(line).partition(": ")[2] for line in machine.tokenizers.values())
        yield tagged("h3", "Tokenizers")
        yield table(("case", "figures"), zip(machine.tokenizers, figures, strict=True))
    if machine.sanitizer:
        cells = [(s["tool"], s["outcome"], s["said"][:120]) for s in machine.sanitizer]
        yield tagged("h3", "compute-sanitizer")
        yield table(("tool", "outcome", "said"), cells)


def _ceiling(line: dict[str, Any]) -> tuple[str, ...]:
    if "gb_s" in line:
        return (
            f"copy, {line['bytes'] / 1e6:,.0f} MB read and written",
            f"{line['gb_s']:,.0f} GB/s",
            f"{line['us']:,.1f}",
        )
    return str(line["what"]), f"{line['tflop_s']:,.0f} TFLOP/s", f"{line['us']:,.1f}"


def _rows(rows: Iterable[Row]) -> Html:
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
    return table(header, cells, numeric=range(2, len(header)))


def _products(products: dict[str, list[dict[str, Any]]]) -> Html:
    """The library beside our best tile, as the table of the device takes it."""
    cells = []
    for name, lines in products.items():
        library, ours = best(lines)
        times = [f"{line['us']:,.1f}" if line is not None else "" for line in (library, ours)]
        found = (f"{ours['speedup_over_library']:.2f}x", ours["candidate"]) if ours is not None else ("", "")
        cells.append((name, *times, *found))
    return table(("product", "library us", "ours us", "speed-up", "our best tile"), cells, numeric=(1, 2, 3))


def _simple(line: dict[str, Any]) -> tuple[str, str]:
    hidden = {"case", "kind", "time", "processor", "threads", "python", "torch", "transformers"}
    shown = {key: value for key, value in line.items() if key not in hidden and not isinstance(value, list)}
    return line["case"], ", ".join(f"{key} {value}" for key, value in shown.items())
