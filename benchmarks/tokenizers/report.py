"""Stored results of tokenizers as text: a line for the terminal, Markdown tables for docs/tokenizer_speed.md."""

from typing import Any

from benchmarks.kit.markdown import NOTHING, facts, table
from benchmarks.kit.record import ROOT
from benchmarks.tokenizers.cases import CASES, TokenizerCase
from benchmarks.tokenizers.contestants import CONTESTANTS
from benchmarks.tokenizers.corpora import CORPORA
from benchmarks.tokenizers.goals import TOKENIZER_GOALS
from benchmarks.tokenizers.stored import Line, best_peer

PAGE = ROOT / "docs" / "tokenizer_speed.md"
_FORMS = {"arrays": "arrays", "padded": "padded to 512", "lists": "lists", "one": "a call each, lists"}
_STAGES = {
    "calls": "calls, and what a text costs whatever it holds",
    "scan": "classifying bytes, finding words",
    "words": "looking words up, writing ids",
    "misses": "longest match of words that are no entries",
    "lists": "beyond arrays: lists of Python ints",
}


def shown(line: Line) -> str:
    """A stored line in one of the terminal."""
    if line["kind"] == "skipped":
        return f"{line['case']}: skipped, {line['reason']}"
    parts = []
    for name, entrant in line.get("entrants", {}).items():
        figures = [f"{entrant[key]:.4g}{unit}" for key, unit in _UNITS.items() if key in entrant]
        if "ratio" in entrant:
            figures.append(f"({entrant['ratio']:.2f}x)")
        if entrant.get("differ"):
            figures.append(f"{entrant['differ']} differ")
        parts.append(f"{name} {' '.join(figures)}")
    hidden = {"kind", "case", "entrants"}
    parts += [f"{key} {value}" for key, value in line.items() if "entrants" not in line and key not in hidden]
    return f"{line['case']}: " + "; ".join(parts)


_UNITS = {
    "mb_per_s": " MB/s",
    "us": " us",
    "load_ms": " ms",
    "used_bytes": " B",
    "growth_bytes": " B",
    "instructions_per_byte": " instructions/B",
    "estimated_cycles_per_byte": " cycles/B",
}


def goals_table(lines: dict[str, Line]) -> str:
    """Every goal beside what is stored: the figures, and whether they keep to it."""
    rows = []
    for goal in TOKENIZER_GOALS:
        bound = f"{'<=' if goal.is_upper else '>='} {goal.shown(goal.bound)}"
        for figure in goal.figures(list(lines.values())):
            measured = "" if figure.value is None else goal.shown(figure.value)
            state = "owed" if figure.value is None else "met" if goal.is_met(figure.value) else "**missed**"
            rows.append((goal.title.removeprefix("tokenizer: "), figure.what, bound, measured, state))
    return table(("goal", "case", "wanted", "measured", ""), rows)


def tables(lines: dict[str, Line]) -> dict[str, str]:
    """Name -> Markdown of every table of the page; one whose results are not stored says so."""
    makers = {
        "taken": _taken,
        "speed": _speed,
        "calls": _calls,
        "own": _own,
        "start": _start,
        "stages": _stages,
        "instructions": _instructions,
    }
    return {name: make(lines) or NOTHING for name, make in makers.items()}


def _taken(lines: dict[str, Line]) -> str:
    """What the figures depend on."""
    known = lines.values()
    found = list(map(" ".join, facts(known, ("processor", "threads", "python", "numpy", "commit")).items()))
    versions: dict[str, set[str]] = {}
    for line in known:
        for name, entrant in line.get("entrants", {}).items():
            if name in CONTESTANTS and "version" in entrant:
                versions.setdefault(name, set()).add(entrant["version"])
    found += [f"{name} {', '.join(sorted(values))}" for name, values in versions.items()]
    dates = sorted(line["time"][:10] for line in known)
    return f"Taken {dates[0]} to {dates[-1]}: {'; '.join(found)}." if dates else ""


def _timed_cases(lines: dict[str, Line]) -> list[tuple[TokenizerCase, Line]]:
    return [(case, lines[case.name]) for case in CASES if case.name in lines and case.form in _FORMS]


def _speed(lines: dict[str, Line]) -> str:
    """MB/s of all contestants; how many times as fast bert_fast is."""
    found = [(case, line) for case, line in _timed_cases(lines) if case.corpus not in ("en_11", "en_128")]
    rows = []
    for case, line in found:
        best = best_peer(line)
        cells = [CORPORA[case.corpus].what, _FORMS[case.form] + (", met before" if case.is_primed else "")]
        for name in CONTESTANTS:
            cells.append(_rate(line["entrants"].get(name), is_best=name == best))
        rows.append(cells)
    return table(("texts", "output", *CONTESTANTS), rows) if rows else ""


def _rate(entrant: dict[str, Any] | None, is_best: bool) -> str:
    if entrant is None:
        return ""
    value = entrant["mb_per_s"]
    text = f"{value:.0f}" if value >= 20 else f"{value:.1f}"
    if "ratio" in entrant:
        text += f" ({entrant['ratio']:.1f}x)"
    return f"**{text}**" if is_best else f"{text} *" if entrant["differ"] else text


def _calls(lines: dict[str, Line]) -> str:
    """Microseconds of a call."""
    rows = []
    for case, line in _timed_cases(lines):
        if case.form == "one":
            times = [f"{line['entrants'][name]['us']:.3f}" if name in line["entrants"] else "" for name in CONTESTANTS]
            rows.append((CORPORA[case.corpus].what, *times))
    return table(("microseconds a call", *CONTESTANTS), rows) if rows else ""


def _own(lines: dict[str, Line]) -> str:
    """Two threads; offsets and word ids; batches for models."""
    rows = []
    for case in ("en_docs/threads", "en_docs/origins", "en_docs/packed", "en_short/packed"):
        name = f"tokenizer/{case}"
        line = lines.get(name)
        for label, entrant in line["entrants"].items() if line is not None else ():
            clock = "wall" if name.endswith("threads") else "CPU"
            ratio = f"{entrant['ratio']:.2f}x" if "ratio" in entrant else ""
            rows.append((name.removeprefix("tokenizer/"), label, f"{entrant['mb_per_s']:.0f}", clock, ratio))
    return table(("case", "who", "MB/s", "time", "bert_fast's speed over it"), rows) if rows else ""


def _start(lines: dict[str, Line]) -> str:
    line = lines.get("tokenizer/start")
    if line is None:
        return ""
    rows = []
    for name, entrant in line["entrants"].items():
        megabytes = [f"{entrant[key] / 1e6:.1f}" for key in ("load_bytes", "used_bytes", "growth_bytes")]
        rows.append((name, f"{entrant['import_ms']:.0f}", f"{entrant['load_ms']:.1f}", *megabytes))
    return table(
        ("", "import, ms", "load, ms", "MB when loaded", "MB after 1.7 MB of text", "MB that 8 MB more add"), rows
    )


def _stages(lines: dict[str, Line]) -> str:
    line = lines.get("tokenizer/breakdown")
    if line is None:
        return ""
    total = line["ns_per_byte"]["real"]
    rows = []
    for stage, what in _STAGES.items():
        share = line["shares"][stage]
        rows.append((what, f"{share:.0%}", f"{share * total:.3f}", f"{1 / (share * total):.1f}" if share > 0 else ""))
    rows.append(("all, to arrays", "100%", f"{total:.3f}", f"{1 / total:.2f}"))
    for what, where in (("read", "memory"), ("read", "cache"), ("copy", "memory"), ("copy", "cache")):
        rate = line[f"{what}_{where}_gb_per_s"]
        rows.append((f"beside it: {what} from {where}", f"{1 / rate / total:.1%}", f"{1 / rate:.3f}", f"{rate:.0f}"))
    return table(("stage", "share", "ns a byte", "GB/s"), rows)


def _instructions(lines: dict[str, Line]) -> str:
    line = lines.get("tokenizer/instructions")
    if line is None:
        return ""
    keys = ("instructions_per_byte", "estimated_cycles_per_byte", "mispredicted_per_kb", "first_cache_misses_per_kb")
    rows = [(name, *(f"{entrant[key]:.1f}" for key in keys)) for name, entrant in line["entrants"].items()]
    header = (
        "",
        "instructions a byte",
        "estimated cycles a byte",
        "mispredicted branches a KB",
        "misses of the first cache a KB",
    )
    return table(header, rows)
