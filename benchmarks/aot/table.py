"""The committed table of the ahead-of-time gate: as JSON (a line per kernel and target), as text and as Markdown.

docs/kernels/ahead_of_time.md explains the columns, and the site shows the tables there. Needs no package.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.aot.device import LIMITS, TARGETS, derive, product_bounds

TABLE_PATH = Path(__file__).with_name("aot_table.json")
OLDEST_PATH = Path(__file__).with_name("aot_table_oldest.json")  # of the oldest Triton that is supported, sm_90 alone

COLUMNS = (
    "registers", "spill_bytes", "spill_instructions", "shared_bytes", "num_warps", "loads", "loads_128", "stores",
    "stores_128", "instructions", "loop_instructions", "loop_half_rate", "loop_bytes", "in_flight_bytes",
    "loop_special", "loop_multiply_adds", "tensor_core_instructions", "warpgroup_products",
    "bulk_copy_instructions", "elements_per_thread", "bytes_per_element", "resident_threads",
    "multiply_adds_per_element", "needs_warpgroup_products", "dropout_per_element", "tile_instructions",
    "tile_half_rate", "tile_special", "register_reallocations", "product_tile", "needs_bulk_copies",
    "is_specialized", "loop_barriers", "conversions", "code",
)  # fmt: skip


def to_json(measured: dict[str, Any]) -> str:
    """The table as committed: the names of the columns once, then one line per kernel and target."""
    rows = [
        f"  {json.dumps(key)}: {json.dumps([row.get(column) for column in COLUMNS])}"
        for key, row in measured["kernels"].items()
    ]
    head = f' "triton": {json.dumps(measured["triton"])},\n "columns": {json.dumps(COLUMNS)},\n "kernels": {{\n'
    return "{\n" + head + ",\n".join(rows) + "\n }\n}\n"


def read(path: Path = TABLE_PATH) -> dict[str, Any]:
    """The committed table: {"triton": version, "kernels": {key: {column: value}}}."""
    table = json.loads(path.read_text())
    rows = {key: dict(zip(table["columns"], row, strict=True)) for key, row in table["kernels"].items()}
    return {"triton": table["triton"], "kernels": rows}


_TEXT = {
    "registers": "regs", "warps": "warps", "spill_bytes": "spill", "shared_bytes": "shared", "loads_128": "ld128",
    "loads": "ld", "stores_128": "st128", "stores": "st", "instructions": "instr", "loop_instructions": "loop",
    "per_element": "per el", "dropout_per_element": "dropout", "issue_share": "issue", "half_rate_share": "alu",
    "in_flight_share": "flight", "tensor_core_instructions": "mma", "warpgroup_products": "hgmma", "clocks": "clocks",
}  # fmt: skip


def text(measured: dict[str, Any]) -> str:
    """The table for a terminal, one kernel and target a line."""
    width = max(map(len, measured["kernels"]), default=0)
    lines = [f"Triton {measured['triton']}", " " * width + "".join(f"{name:>8}" for name in _TEXT.values())]
    for key, row in measured["kernels"].items():
        full = row | derive(row, key.rsplit(" ", 1)[1])
        full["clocks"] = full["clocks"] and "/".join(map(str, full["clocks"].values()))
        cells = ("-" if full.get(field) is None else full[field] for field in _TEXT)
        lines.append(f"{key:<{width}}" + "".join(f"{cell:>8}" for cell in cells))
    return "\n".join(lines)


_LENGTHS = (768, 1024, 3072)


def _configuration_names(kernels: dict[str, Any]) -> dict[str, list[str]]:
    """Kernel -> what tells its configurations apart, in the order of the table."""
    found: dict[str, list[str]] = {}
    for key in kernels:
        kernel, rest = key.split(" ", 1)
        rest = rest.rsplit(" ", 1)[0]
        if rest not in found.setdefault(kernel, []):
            found[kernel].append(rest)
    return found


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def _registers(row: dict[str, Any]) -> str:
    return f"{row['registers']}" + (f", {row['spill_bytes']} bytes spilled" if row["spill_bytes"] else "")


def _cells(row: dict[str, Any]) -> dict[str, object]:
    """Column -> cell of a kernel that memory should limit, on sm_90."""
    derived, body, whole = derive(row, "sm_90"), row["loop_instructions"], row["instructions"]
    return {
        "registers": _registers(row),
        "warps": derived["warps"],
        "shared": row["shared_bytes"],
        "loads": f"{row['loads_128']} / {row['loads']}",
        "stores": f"{row['stores_128']} / {row['stores']}",
        "instructions": whole if body == whole else f"{body} / {whole}",
        "barriers": row["loop_barriers"],
        "conversions": row["conversions"],
        "per element": derived["per_element"],
        "dropout": row["dropout_per_element"],
        "issue": derived["issue_share"],
        "half rate": derived["half_rate_share"],
        "in flight": derived["in_flight_share"],
    }


def _product_cells(row: dict[str, Any]) -> dict[str, object]:
    """Column -> cell of a kernel with matrix products, on sm_90."""
    cells = {name: _cells(row)[name] for name in ("registers", "warps", "shared", "loads", "stores", "instructions")}
    others = row["tensor_core_instructions"] - row["warpgroup_products"]
    made = ((row["warpgroup_products"], "HGMMA"), (others, "HMMA"))
    derived = derive(row, "sm_90")
    return cells | {
        "products": ", ".join(f"{count} {name}" for count, name in made if count),
        "per score": derived["per_element"],
        "dropout": row["dropout_per_element"],
        **{f"clocks: {limit.replace('_', ' ')}": (derived["clocks"] or {}).get(limit) for limit in LIMITS},
    }


def _gemm_cells(row: dict[str, Any]) -> dict[str, object]:
    """Column -> cell of a matrix product of linear layers, on sm_90."""
    cells: dict[str, object] = {
        "tile": "x".join(map(str, row["product_tile"])),
        "registers": _registers(row),
        "shared": row["shared_bytes"],
        "programs": derive(row, "sm_90")["warps"] // row["num_warps"],
        "products": row["warpgroup_products"],
        "copies": row["bulk_copy_instructions"],
        "specialized": row["register_reallocations"] or "",
        "step": "",
        "finish": "",
    }
    if not row["needs_warpgroup_products"]:
        return cells | {f"bound, K = {length}": "" for length in _LENGTHS}
    bounds = product_bounds(row, *_LENGTHS)
    cells["step"] = " / ".join(str(bounds[f"step_{what}"]) for what in ("products", "shared", "issue"))
    cells["finish"] = " / ".join(map(str, bounds["finish_by"].values()))
    for length in _LENGTHS:
        cells[f"bound, K = {length}"] = f"{bounds[f'tflop_s {length}']} ({bounds[f'not_overlapped {length}']})"
    return cells


_COMPARED = {
    "registers": "registers", "spill_bytes": "spilled bytes", "shared_bytes": "shared bytes",
    "conversions": "conversions", "loop_barriers": "barriers",
}  # fmt: skip


def markdown_versions(table: dict[str, Any], oldest: dict[str, Any]) -> str:
    """What two versions of Triton make differently, by kernel: the most of all configurations, old / new."""
    lines = [
        f"| Triton {oldest['triton']} / {table['triton']} | " + " | ".join(_COMPARED.values()) + " |",
        "| --- |" + " --- |" * len(_COMPARED),
    ]
    for kernel in _configuration_names(oldest["kernels"]):
        keys = [key for key in oldest["kernels"] if key.split(" ", 1)[0] == kernel]
        most = [[max(one["kernels"][key][column] for key in keys) for column in _COMPARED] for one in (oldest, table)]
        cells = [str(old) if old == new else f"{old} / {new}" for old, new in zip(*most, strict=True)]
        lines.append(f"| {kernel} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown(table: dict[str, Any]) -> str:
    """A section for each kernel: its configurations on sm_90, then on the other targets."""
    kernels = table["kernels"]
    lines = [f"Compiled by Triton {table['triton']}; {len(kernels)} compilations."]
    others = [name for name in TARGETS if name != "sm_90"]
    for kernel, configurations in _configuration_names(kernels).items():
        rows = {one: kernels[f"{kernel} {one} sm_90"] for one in configurations}
        has_products = any(row["tensor_core_instructions"] for row in rows.values())
        plain = _product_cells if has_products else _cells
        cells_of = {one: (_gemm_cells if row["product_tile"] else plain)(row) for one, row in rows.items()}
        header = next(iter(cells_of.values()))
        lines += ["", f"### {kernel}", "", f"| `sm_90` | {' | '.join(header)} |", "| --- |" + " --- |" * len(header)]
        lines += [f"| {one} | " + " | ".join(map(_cell, cells.values())) + " |" for one, cells in cells_of.items()]
        lines += [
            "",
            "| registers, warps, 128-bit loads, 128-bit stores | " + " | ".join(f"`{name}`" for name in others) + " |",
            "| --- |" + " --- |" * len(others),
        ]
        for one in configurations:
            cells = []
            for name in others:
                row = kernels[f"{kernel} {one} {name}"]
                wide = f"{row['loads_128']} / {row['loads']}, {row['stores_128']} / {row['stores']}"
                cells.append(f"{_registers(row)}, {derive(row, name)['warps']}, {wide}")
            lines.append(f"| {one} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
