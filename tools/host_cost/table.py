"""The numbers as they are written down, as rows, and what has risen above them."""

import json
from collections.abc import Iterator
from pathlib import Path

from tools.host_cost.measure import Parts

RECORD = Path(__file__).resolve().parents[2] / "tests" / "host_cost.json"
MARGIN = 0.03  # above what is written down; two runs differ by less than 0.01
Table = dict[str, dict[str, dict[str, Parts]]]  # by precision, case and contestant


def read() -> Table:
    """Returns what was written down."""
    return json.loads(RECORD.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def write(table: Table) -> None:
    """Writes the numbers down."""
    RECORD.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def rows(table: Table) -> Iterator[tuple[str, str, str, list[float], float | None]]:
    """Yields precision, case, part, millions of instructions of each contestant, and the share."""
    for precision, cases in table.items():
        for case, contestants in cases.items():
            parts = next(iter(contestants.values()))
            sums = {part: [part] for part in parts} | {"both passes": ["forward", "backward"]}
            if "optimize" in parts:
                sums["whole step"] = list(parts)
            for name, of in sums.items():
                numbers = [sum(counts[part] for part in of) / 1e6 for counts in contestants.values()]
                yield precision, case, name, numbers, numbers[0] / numbers[-1] if len(numbers) > 1 else None


def risen(table: Table, recorded: Table) -> list[str]:
    """Returns what bert_fast spends above what was written down, a line each."""
    return [
        f"{precision}, {case}, {part}: {count} instructions of the host, {written} were written down"
        for precision, cases in table.items()
        for case, contestants in cases.items()
        for part, count in contestants["fused"].items()
        if count > (written := recorded[precision][case]["fused"][part]) * (1 + MARGIN)
    ]
