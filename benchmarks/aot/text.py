"""What was measured, for a terminal: a line for each configuration and target.

docs/kernels/ahead_of_time.md explains the columns.
"""

from typing import Any

from benchmarks.aot.device import TARGETS, derive, product_bounds

_COLUMNS = {
    "registers": "regs", "warps": "warps", "spill_bytes": "spill", "shared_bytes": "shared", "loads_128": "ld128",
    "loads": "ld", "stores_128": "st128", "stores": "st", "instructions": "instr", "loop_instructions": "loop",
    "loop_barriers": "bar", "conversions": "conv", "per_element": "per el", "dropout_per_element": "dropout",
    "issue_share": "issue", "half_rate_share": "alu", "in_flight_share": "flight", "tensor_core_instructions": "mma",
    "warpgroup_products": "hgmma", "clocks": "clocks",
}  # fmt: skip
_LENGTHS = (768, 1024, 3072)


def text(rows: dict[str, dict[str, Any]]) -> str:
    """A table of all rows, then one of what bounds the matrix products among them on sm_90."""
    width = max(map(len, rows), default=0)
    lines = [" " * width + "".join(f"{name:>8}" for name in _COLUMNS.values())]
    for key, row in rows.items():
        target = key.rsplit(" ", 1)[1]
        full = row | (derive(row, target) if target in TARGETS else {})  # of cards there is no listing
        if full.get("clocks"):
            full["clocks"] = "/".join(map(str, full["clocks"].values()))
        cells = ("-" if full.get(field) is None else full[field] for field in _COLUMNS)
        lines.append(f"{key:<{width}}" + "".join(f"{cell:>8}" for cell in cells))
    for key, row in rows.items():
        if key.endswith(" sm_90") and row["product_tile"] and row["needs_warpgroup_products"]:
            lines.append(f"{key:<{width}}  {_bounds(row)}")
    return "\n".join(lines)


def _bounds(row: dict[str, Any]) -> str:
    """Tile, clocks of a step and of finishing, TFLOP/s by K."""
    found = product_bounds(row, *_LENGTHS)
    step = "/".join(str(found[f"step_{what}"]) for what in ("products", "shared", "issue"))
    bounds = ", ".join(f"K={k} {found[f'tflop_s {k}']} ({found[f'not_overlapped {k}']})" for k in _LENGTHS)
    finish = "/".join(map(str, found["finish_by"].values()))
    return f"{'x'.join(map(str, row['product_tile']))}: step {step}, finish {finish}, TFLOP/s {bounds}"
