"""What is known of every kernel without a GPU: tests/kernels.json, a line for each, written by `make kernels`.

Three sections, each with what it is of, what was found, and a digest of all that decides it:

    compiled   "<kernel> <target>": what its configurations take, as `benchmarks.aot` reads it from machine code
    rehearsed  "<family> <chip>": what the launchers of a family ask of a chip (`tools.null_driver.rehearsal`)
    witnessed  "<kernel> <target>": how the PTX computed (`tools.witness`)

A target may be followed by "oldest": by the oldest Triton that is supported instead of the newest. Needs no package.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "tests" / "kernels.json"
COLUMNS = {
    "compiled": (
        "configurations", "registers", "all_registers", "spill_bytes", "all_spill_bytes", "shared_bytes",
        "wide_accesses", "barriers", "conversions", "per_element", "digest",
    ),
    "rehearsed": ("calls", "launches", "tensor_maps", "programs", "shared_bytes", "digest"),
    "witnessed": ("cases", "programs", "share", "digest"),
}  # fmt: skip

Rows = dict[str, dict[str, Any]]


def read() -> dict[str, Any]:
    """{"triton": {"newest": version, "oldest": version}, section: {key: {column: value}}}."""
    raw = json.loads(PATH.read_text(encoding="utf-8"))
    sections = {name: {key: dict(zip(columns, raw[name][key], strict=True)) for key in raw[name]}
                for name, columns in COLUMNS.items()}  # fmt: skip
    return {"triton": raw["triton"]} | sections


def stale(section: str, current: Mapping[str, str]) -> list[str]:
    """The keys of which the record has nothing, or something else. current: key -> digest of what decides it now."""
    rows = read()[section]
    return [key for key, digest in current.items() if rows.get(key, {}).get("digest") != digest]


def update(section: str, found: Rows, keys: Iterable[str] | None = None, triton: dict[str, str] | None = None) -> None:
    """Puts rows in the place of those of the same keys.

    keys: of all rows that the section may have, in their order; others go. By default those it has, then the new ones.
    triton: versions that are others now.
    """
    known = read()
    rows = known[section] | found
    known[section] = {key: rows[key] for key in (rows if keys is None else keys) if key in rows}
    known["triton"] |= triton or {}
    PATH.write_text(_to_json(known), encoding="utf-8")


def compiled_table() -> str:
    """Markdown, a line for each kernel: what the configuration takes that needs most, on each target."""
    return _table("compiled", lambda row: f"{row['registers']}, {row['shared_bytes']:,}, {row['spill_bytes']}")


def rehearsed_table() -> str:
    """Markdown, a line for each family of ops: the calls and launches on a chip, and what one of them asks for."""
    return _table(
        "rehearsed",
        lambda row: f"{row['launches']} of {row['calls']}, {row['tensor_maps']}, {row['shared_bytes']:,}",
    )


def witnessed_table() -> str:
    """Markdown, a line for each kernel: the cases that launch it, the programs that they ran, and the worst error."""
    return _table(
        "witnessed",
        lambda row: f"{row['cases']}, {row['programs']:,}" + ("" if row["share"] is None else f", {row['share']}"),
    )


def _table(section: str, cell: Callable[[dict[str, Any]], str]) -> str:
    """What keys have before their first space goes down, the rest across."""
    rows = read()[section]
    names, targets = (list(dict.fromkeys(part)) for part in zip(*(key.split(" ", 1) for key in rows), strict=True))
    lines = [f"| | {' | '.join(targets)} |", "| --- |" + " --- |" * len(targets)]
    for name in names:
        cells = (cell(rows[key]) if (key := f"{name} {target}") in rows else "" for target in targets)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _to_json(record: dict[str, Any]) -> str:
    """The names of the columns once, then a line for each row."""
    parts = [f' "triton": {json.dumps(record["triton"])}']
    for name, columns in COLUMNS.items():
        rows = [
            f"  {json.dumps(key)}: {json.dumps([row[column] for column in columns])}"
            for key, row in record[name].items()
        ]
        parts.append(f' "{name}": {{\n' + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"
