"""Whether the Triton at hand compiles a stored table's tiles as they were when they were timed.

That is: nothing is spilled, and a multiprocessor holds as many programs as a tile is meant for (`Tile.resident`).
Needs no GPU.
"""

from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.aot.compile import compiled_row
from benchmarks.aot.device import TARGETS, resident_warps
from benchmarks.aot.launches import Launch, capture
from benchmarks.gemm_tuning.launches import product_of
from benchmarks.gemm_tuning.products import Product, compute, operands
from bert_fast.triton._gemm_tiles import Tile
from bert_fast.triton._launch import assume_architecture


def problems(entries: Iterable[dict[str, Any]], architecture: str) -> list[str]:
    """What of a table's products does not compile as it should, a line each."""
    found: dict[str, tuple[Product, Tile, Launch]] = {}
    for entry in entries:
        if entry["tile"] is None:
            continue
        product, tile = product_of(entry), Tile.from_json(entry["tile"])
        with assume_architecture(architecture), capture() as launches:
            compute(product, operands(product, torch.device("meta")), tile)
        for launch in launches:
            if launch.kernel.__name__ == "_gemm_kernel":
                found.setdefault(launch.identity, (product, tile, launch))
    texts = []
    for product, tile, launch in found.values():
        name = product.name
        try:
            row = compiled_row(architecture, name, launch)
        except RuntimeError as error:  # it names the product
            texts.append(str(error).splitlines()[0])
            continue
        programs = resident_warps(TARGETS[architecture], row["registers"], row["shared_bytes"], tile.num_warps)
        programs //= tile.num_warps
        resident = 1 if product.kind == "accumulate" else tile.resident  # as the launcher has it
        if row["spill_bytes"]:
            texts.append(f"{name}: {row['spill_bytes']} bytes of {row['registers']} registers are spilled")
        elif programs < resident:
            texts.append(f"{name}: {programs} programs to a multiprocessor, expected {resident}")
    return texts
