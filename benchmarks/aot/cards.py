"""The committed record of cards: what every kernel takes on the GPUs that people own, a line for each.

A card's kernels are those of sm_80, compiled for another chip. What can differ, and stop one from running or slow it
down unseen, is how many registers ptxas gives, what it spills, and shared memory, of which cards have least: so that
is all that is kept, with the hash of what decides it (`compile.code_of`, shortened).
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.aot.device import CARDS

CARDS_PATH = Path(__file__).with_name("cards.json")
COLUMNS = ("registers", "spill_bytes", "shared_bytes", "code")
Record = dict[str, Any]


def names_of(kernels: dict[str, Any]) -> list[str]:
    """The configurations among keys "<kernel> <configuration> <target>", each once."""
    return list(dict.fromkeys(key.rsplit(" ", 1)[0] for key in kernels))


def to_json(measured: Record) -> str:
    """The record as committed: the names of columns and cards once, then a line per configuration."""
    kernels, dumps = measured["kernels"], json.dumps
    rows = [
        f"  {dumps(name)}: {dumps([[kernels[f'{name} {card}'][column] for column in COLUMNS] for card in CARDS])}"
        for name in names_of(kernels)
    ]
    head = {"triton": measured["triton"], "columns": COLUMNS, "cards": list(CARDS)}
    lines = [f" {dumps(name)}: {dumps(value)},\n" for name, value in head.items()]
    return "{\n" + "".join(lines) + ' "kernels": {\n' + ",\n".join(rows).replace(", ", ",") + "\n }\n}\n"


def read(path: Path = CARDS_PATH) -> Record:
    """The committed record: {"triton": version, "kernels": {key: {column: value}}}, a key for each card."""
    record = json.loads(path.read_text())
    rows = {
        f"{name} {card}": dict(zip(record["columns"], row, strict=True))
        for name, of_cards in record["kernels"].items()
        for card, row in zip(record["cards"], of_cards, strict=True)
    }
    return {"triton": record["triton"], "kernels": rows}


def text(measured: Record) -> str:
    """Rows for a terminal, one kernel and card a line."""
    width = max(map(len, measured["kernels"]), default=0)
    lines = [" " * width + "".join(f"{name:>14}" for name in COLUMNS[:3])]
    for key, row in measured["kernels"].items():
        lines.append(f"{key:<{width}}" + "".join(f"{row[column]:>14}" for column in COLUMNS[:3]))
    return "\n".join(lines)


def markdown(record: Record) -> str:
    """A table: for each kernel what its hungriest configuration takes, by card."""
    kernels = record["kernels"]
    lines = [
        "| registers, shared bytes, spilled bytes | configurations | "
        + " | ".join(f"`{name}`" for name in CARDS)
        + " |",
        "| --- | --- |" + " --- |" * len(CARDS),
    ]
    names = names_of(kernels)
    for kernel in dict.fromkeys(name.split(" ", 1)[0] for name in names):
        ones = [name for name in names if name.split(" ", 1)[0] == kernel]
        cells = []
        for card in CARDS:
            rows = [kernels[f"{name} {card}"] for name in ones]
            cells.append(
                ", ".join(str(max(row[column] for row in rows)) for column in (COLUMNS[0], COLUMNS[2], COLUMNS[1]))
            )
        lines.append(f"| {kernel} | {len(ones)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
