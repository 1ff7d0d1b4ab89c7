"""The committed table of the ahead-of-time gate, as JSON (a line per kernel and target), as text and as a page."""

import json
from pathlib import Path
from typing import Any

from benchmarks.aot import cards
from benchmarks.aot.device import ISSUE_SLOTS_PER_BYTE, LIMITS, NEEDED_IN_FLIGHT_BYTES, TARGETS, derive, product_bounds
from benchmarks.kit.record import ROOT

TABLE_PATH = Path(__file__).with_name("aot_table.json")
OLDEST_PATH = Path(__file__).with_name("aot_table_oldest.json")  # of the oldest Triton that is supported, sm_90 alone
PAGE_PATH = ROOT / "docs" / "kernels" / "ahead_of_time.md"

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


_INTRODUCTION = f"""# What the kernels compile to

Made by `python -m benchmarks.aot` from `benchmarks/aot/aot_table.json`; do not edit. Every Triton kernel, in every
launch configuration that ships, is compiled for {", ".join(f"`{name}`" for name in TARGETS)}
without a GPU, and read back from the machine code. `python -m benchmarks.aot --check` compiles again and fails on a
spill, on shared memory that does not fit, on a lost 128-bit access, on more registers, on dropout above 18 instructions
an element (`sm_90`), on programs
that are meant to be resident and do not fit, on a kernel that issues more than memory leaves time for, and on matrix
products that leave the tensor cores or, on `sm_90` in half precision, are not made by four warps at a time (`HGMMA`),
or whose operands the copy engine does not move (`UTMALDG`), or that lack warps of their own for it where a tile wants
them (`USETMAXREG`). With `--quick`, as `make test` calls it, rows whose code hashes to what the table notes come from
the table, all but one in 16.

These figures say why a kernel should be limited by memory. That it is, only a GPU can show.

- **registers**: of a thread; 255 is the most. Spills are 0 but where a line says otherwise: attention in fp32 with a
  bias or relative positions, where no tile is small enough. Another version of Triton may also spill in fp32 with heads
  of more than 64 columns (3.6: 8 bytes).
- **warps**: resident on a multiprocessor by registers, shared memory and warps per program, of
  {TARGETS["sm_90"].max_warps} (`gfx942`: waves, of {TARGETS["gfx942"].max_warps}).
- **loads**, **stores**: of global memory, 128 bits wide / all. What is narrower is one number per row (statistics,
  coordinates) or per program.
- **barriers**: of a program, in the main loops; **conversions**: of one layout to another, in the whole kernel, most of
  them through shared memory.
- **instructions**: of one pass of the main loops / of the whole kernel, per thread; one number where no loop is.
- **per element**: instructions of one pass over the elements that a thread treats in it. What stands before and after
  the loops is left out: it is paid once per program, whatever the number of rows.
- **dropout**: the same, minus the kernel without dropout.
- **issue**: share of the issue slots that memory leaves: instructions per element / (bytes per element x
  {ISSUE_SLOTS_PER_BYTE:.1f}). An H200 issues 132 multiprocessors x 4 schedulers x 32 lanes x 1.755 GHz and was measured
  to copy 4.3 TB/s.
- **half rate**: the same for integer, logic, compare and convert instructions, which issue at half that rate.
- **in flight**: bytes that the resident warps have asked for at once, over the
  {NEEDED_IN_FLIGHT_BYTES / 1024:.0f} KB per multiprocessor that bandwidth x latency needs.
  Latency: 480 cycles on an idle H100 (Luo et al. 2024, arXiv:2402.13499), doubled for a busy memory, which is an
  assumption. Loads that a cache answers (weights) are counted too.

A kernel below 1 in **issue** and **half rate** and above 1 in **in flight** has what it takes to be limited by memory.
Kernels without these figures treat little data, such as second stages of sums, or no fixed number of elements.

Kernels of attention make matrix products, and memory is not what limits them. Their elements are scores (a query and a
key of one head), and their main loop is the one over whole tiles; those at the edges of a sequence have another.

- **products**: instructions of the tensor cores in the whole kernel. fp32 takes three products of TF32 for one (some
  calls with relative positions none, but multiply-adds), or one where PyTorch is told to allow it.
- **per score**: instructions of the main loop (of the whole kernel, where a tile is a whole head) per score.
- **clocks**: that a multiprocessor takes for 1,000 scores, at least, for each of four reasons: issuing (128 lanes a
  clock), integer, logic, compare and convert instructions (64), the special function unit (16), and the tensor cores
  (2,048 multiply-adds of half precision). The largest bounds the kernel, if it has warps enough to hide every latency.

The matrix products of linear layers (`gemm`) have a table of their own kind: what bounds them on an H200, by count.
`docs/kernels/linear.md` says what to make of it. Columns:

- **programs**: on a multiprocessor by registers and shared memory. With two, one multiplies while the other finishes.
- **products**: `HGMMA` in the kernel; **copies**: instructions of the copy engine; **specialized**: `USETMAXREG`.
- **step**: clocks of a multiprocessor for one step along K: of its tensor cores / of its shared memory / of issuing.
- **finish**: clocks for everything that follows the last step of a tile: issuing / half rate / special.
- **bound**: TFLOP/s at K = 768, 1,024 and 3,072, of the 790 that large products of the library were measured to reach;
  in brackets, if finishing a tile were never hidden behind another's steps. fp32 makes three products for one and has
  no bound here.
"""
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


_VERSIONS = """## Triton {oldest}

The oldest version that is supported compiles some kernels differently (`benchmarks/aot/aot_table_oldest.json`, made by
`python -m benchmarks.aot` with that Triton; the gate holds it as it holds the table). Of all configurations of a kernel
on `sm_90` the most under {oldest} / {newest}, where they differ. **conversions**: of layouts, in the whole kernel
(`ttg.convert_layout`); most go through shared memory. **barriers**: of a program, in the main loops.
"""
_COMPARED = {
    "registers": "registers", "spill_bytes": "spilled bytes", "shared_bytes": "shared bytes",
    "conversions": "conversions", "loop_barriers": "barriers",
}  # fmt: skip


def _versions(table: dict[str, Any], oldest: dict[str, Any]) -> list[str]:
    """Lines of the page: what two versions of Triton make differently, by kernel."""
    lines = [
        _VERSIONS.format(oldest=oldest["triton"], newest=table["triton"]),
        "| kernel | " + " | ".join(_COMPARED.values()) + " |",
        "| --- |" + " --- |" * len(_COMPARED),
    ]
    for kernel in _configuration_names(oldest["kernels"]):
        keys = [key for key in oldest["kernels"] if key.split(" ", 1)[0] == kernel]
        most = [[max(one["kernels"][key][column] for key in keys) for column in _COMPARED] for one in (oldest, table)]
        cells = [str(old) if old == new else f"{old} / {new}" for old, new in zip(*most, strict=True)]
        lines.append(f"| {kernel} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def page(table: dict[str, Any], of_cards: dict[str, Any], oldest: dict[str, Any]) -> str:
    """The page of the documentation: the table, what the oldest Triton makes of it, and the record of cards."""
    kernels = table["kernels"]
    lines = [_INTRODUCTION, f"Compiled by Triton {table['triton']}; {len(kernels)} compilations.\n"]
    others = [name for name in TARGETS if name != "sm_90"]
    for kernel, configurations in _configuration_names(kernels).items():
        rows = {one: kernels[f"{kernel} {one} sm_90"] for one in configurations}
        has_products = any(row["tensor_core_instructions"] for row in rows.values())
        plain = _product_cells if has_products else _cells
        cells_of = {one: (_gemm_cells if row["product_tile"] else plain)(row) for one, row in rows.items()}
        header = next(iter(cells_of.values()))
        lines += [f"## {kernel}\n", f"| `sm_90` | {' | '.join(header)} |", "| --- |" + " --- |" * len(header)]
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
        lines.append("")
    return "\n".join(lines + _versions(table, oldest) + cards.section(of_cards)) + "\n"
