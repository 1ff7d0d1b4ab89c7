"""Markdown of stored results: tables, and pages of docs/ whose tables stand between marks.

<!-- table: NAME -->
| ... |
<!-- end of table -->
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

NOTHING = "Nothing is stored."
_MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text cells."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page_with(page: str, tables: Mapping[str, str]) -> str:
    """The page with the present tables between its marks. ValueError if a mark names none."""

    def replaced(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name not in tables:
            raise ValueError(f"table: expected one of {', '.join(tables)}, got {name!r}")
        return f"{start}{tables[name]}\n{end}"

    return _MARKED.sub(replaced, page)


def show_tables(tables: Mapping[str, str], path: Path, write: bool) -> None:
    """What a command prints for `--tables`; with `--write` the page gets them, too."""
    print("\n\n".join(f"{name}\n\n{text}" for name, text in tables.items()))
    if write:
        path.write_text(page_with(path.read_text(encoding="utf-8"), tables), encoding="utf-8")


def facts(lines: Iterable[Mapping[str, Any]], keys: Iterable[str]) -> dict[str, str]:
    """What the lines say of themselves, by key; several values where they differ."""
    lines = list(lines)
    found = {key: sorted({str(line[key]) for line in lines if line.get(key) is not None}) for key in keys}
    return {key: ", ".join(values) for key, values in found.items() if values}
