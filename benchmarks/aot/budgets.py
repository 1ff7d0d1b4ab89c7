"""What a kernel may take on a target, over all of its configurations: the section `compiled` of the kernels' record.

Of registers and spilled bytes a budget has the most of a configuration, and the sum over all, which grows
where any of them does. `wide_accesses`: loads and stores of 128 bits. `per_element`: instructions of the main loops.
Of cards there is no listing: only what can differ from sm_80 and stop a kernel is kept (registers, spills, shared
memory).
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.aot.launches import Configuration
from tools.kernel_record import Rows

# What may not grow from one record to the next without being seen; of wide accesses there may not be fewer.
_NOT_MORE = ("registers", "all_registers", "spill_bytes", "all_spill_bytes", "shared_bytes", "barriers", "conversions",
             "per_element")  # fmt: skip
_OF_ONE = ("registers", "spill_bytes", "shared_bytes")


def kernel_of(name: str) -> str:
    """The kernel that a configuration, or "<configuration> <target>", names."""
    return name.split(" ", 1)[0]


def grouped(configurations: Iterable[Configuration]) -> dict[str, list[Configuration]]:
    """Kernel -> its configurations."""
    found: dict[str, list[Configuration]] = {}
    for one in configurations:
        found.setdefault(kernel_of(one.name), []).append(one)
    return found


def digest(codes: Iterable[str]) -> str:
    """Of what decides all configurations of a kernel on a target: `compile.code_of` of each."""
    return hashlib.sha256(" ".join(sorted(codes)).encode()).hexdigest()[:12]


def budget(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The budget of one kernel and target, of the rows of all its configurations."""

    def total(*columns: str) -> int | None:
        """None of a card, of which nothing was counted."""
        return sum(row[column] for row in rows for column in columns) if columns[0] in rows[0] else None

    counted = [row for row in rows if row["elements_per_thread"] and "loop_instructions" in row]
    per_element = [round(row["loop_instructions"] / row["elements_per_thread"], 1) for row in counted]
    return {
        "configurations": len(rows),
        **{column: max(row[column] for row in rows) for column in _OF_ONE},
        "all_registers": total("registers"),
        "all_spill_bytes": total("spill_bytes"),
        "wide_accesses": total("loads_128", "stores_128"),
        "barriers": total("loop_barriers"),
        "conversions": total("conversions"),
        "per_element": max(per_element, default=None),
        "digest": digest(row["code"] for row in rows),
    }


def differences(found: Rows, recorded: Rows) -> tuple[list[str], list[str]]:
    """(what grew, what became less), a line for each budget that is another; of wide accesses the other way round."""
    worse, better = [], []
    for key, row in found.items():
        before = recorded.get(key)
        if before is None or before["configurations"] != row["configurations"]:
            continue  # of other configurations sums say nothing
        for column in (*_NOT_MORE, "wide_accesses"):
            now, old = row[column], before[column]
            if now != old:
                grew = old is None or (now is not None and now > old)
                (worse if grew == (column != "wide_accesses") else better).append(f"{key}: {column} {old} -> {now}")
    return worse, better


def beyond(key: str, row: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """Where one configuration takes more than its kernel's budget."""
    return [
        f"{key}: {row[column]} {column}, budget {recorded[column]}"
        for column in _OF_ONE
        if row[column] > recorded[column]
    ]
