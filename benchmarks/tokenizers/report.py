"""Stored results of tokenizers as text: a line for the terminal, Markdown tables for docs/tokenizer_speed.md."""

from collections.abc import Iterator
from typing import Any

from benchmarks.kit.markdown import NOTHING, facts, table
from benchmarks.kit.results import ROOT
from benchmarks.tokenizers.cases import CASES, TokenizerCase
from benchmarks.tokenizers.contestants import CONTESTANTS
from benchmarks.tokenizers.corpora import CORPORA
from benchmarks.tokenizers.stored import Line, best_peer

PAGE = ROOT / "docs" / "tokenizer_speed.md"
Lines = dict[str, Line]
Rows = list[tuple[str, ...]]
_FORMS = {"arrays": "arrays", "padded": "padded to 512", "lists": "lists", "one": "a call each, lists"}
_UNITS = {"mb_per_s": " MB/s", "us": " us"}


def shown(line: Line) -> str:
    """A stored line in one of the terminal."""
    parts = []
    for name, entrant in line.get("entrants", {}).items():
        figures = [f"{entrant[key]:.4g}{unit}" for key, unit in _UNITS.items() if key in entrant]
        if "ratio" in entrant:
            figures.append(f"({entrant['ratio']:.2f}x)")
        if entrant.get("differ"):
            figures.append(f"{entrant['differ']} differ")
        parts.append(f"{name} {' '.join(figures)}")
    return f"{line['case']}: " + "; ".join(parts)


def tables(lines: Lines) -> dict[str, str]:
    """Name -> Markdown of every table of the page; one whose results are not stored says so."""
    found = {"taken": _taken(lines)}
    for name, (header, make) in _TABLES.items():
        rows = list(make(lines))
        found[name] = table(header, rows) if rows else NOTHING
    return found


def _taken(lines: Lines) -> str:
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
    return f"Taken {dates[0]} to {dates[-1]}: {'; '.join(found)}." if dates else NOTHING


def _timed_cases(lines: Lines) -> Iterator[tuple[TokenizerCase, Line]]:
    return ((case, lines[case.name]) for case in CASES if case.name in lines and case.form in _FORMS)


def _speed(lines: Lines) -> Iterator[tuple[str, ...]]:
    """MB/s of all contestants; how many times as fast bert_fast is."""
    for case, line in _timed_cases(lines):
        if case.corpus not in ("en_11", "en_128"):
            best, form = best_peer(line), _FORMS[case.form] + (", met before" if case.is_primed else "")
            rates = (_rate(line["entrants"].get(name), is_best=name == best) for name in CONTESTANTS)
            yield CORPORA[case.corpus].what, form, *rates


def _rate(entrant: dict[str, Any] | None, is_best: bool) -> str:
    if entrant is None:
        return ""
    value = entrant["mb_per_s"]
    text = f"{value:.0f}" if value >= 20 else f"{value:.1f}"
    if "ratio" in entrant:
        text += f" ({entrant['ratio']:.1f}x)"
    return f"**{text}**" if is_best else f"{text} *" if entrant["differ"] else text


def _calls(lines: Lines) -> Iterator[tuple[str, ...]]:
    """Microseconds of a call."""
    for case, line in _timed_cases(lines):
        if case.form == "one":
            found = line["entrants"]
            times = (f"{found[name]['us']:.3f}" if name in found else "" for name in CONTESTANTS)
            yield CORPORA[case.corpus].what, *times


def _own(lines: Lines) -> Iterator[tuple[str, ...]]:
    """Two threads; offsets and word ids; batches for models."""
    for case in ("en_docs/threads", "en_docs/origins", "en_docs/packed", "en_short/packed"):
        clock = "wall" if case.endswith("threads") else "CPU"
        for label, entrant in lines.get(f"tokenizer/{case}", {"entrants": {}})["entrants"].items():
            ratio = f"{entrant['ratio']:.2f}x" if "ratio" in entrant else ""
            yield case, label, f"{entrant['mb_per_s']:.0f}", clock, ratio


_TABLES = {
    "speed": (("texts", "output", *CONTESTANTS), _speed),
    "calls": (("microseconds a call", *CONTESTANTS), _calls),
    "own": (("case", "who", "MB/s", "time", "bert_fast's speed over it"), _own),
}
