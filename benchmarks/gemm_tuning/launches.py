"""What the launcher passes to the kernels for the tiles of a stored table, found without a GPU.

A table is stale if its tiles are launched in another way than they were timed: `--write-table` stores the hash, and a
test compares it. A change to the launcher that leaves a table's tiles alone leaves the hash alone.
"""

import functools
import hashlib
import threading
from typing import Any

import torch

from benchmarks.gemm_tuning.products import PRODUCTS, Product, compute, operands
from bert_fast.triton._gemm_tiles import Tile
from bert_fast.triton._launch import assume_architecture
from bert_fast.triton._launch_plan import recorders

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")  # a table says which GPU it is of, and not of which kind
_KEY = ("kind", "layout", "dtype", "m", "n", "k")


class _Recorder:
    """Takes launches of matrix products down, in the place of making them."""

    def __init__(self) -> None:
        self.launches: list[str] = []

    def note_launch(self, plan: Any, grid: tuple[int, ...], _operands: Any, numbers: tuple[float, ...]) -> None:
        name = plan._kernel.__name__
        if name.startswith("_gemm"):
            self.launches.append(repr((name, plan.windows, sorted(plan._constants.items()), grid, numbers)))

    def spoil(self) -> None:
        """What a program in the making is told of a launch that it cannot have."""


def launches(product: Product, tile: Tile) -> list[str]:
    """Kernels, constants, options, grids and numbers of a product that our kernel makes, on each kind of processor."""
    recorder, thread = _Recorder(), threading.get_ident()
    given = operands(product, torch.device("meta"))
    for architecture in ARCHITECTURES:
        recorders[thread] = recorder
        try:
            with assume_architecture(architecture):
                compute(product, given, tile)
        finally:
            del recorders[thread]
    return recorder.launches


def launches_hash(entries: list[dict[str, Any]]) -> str:
    """Hash of the launches of all entries of a table that our kernel makes."""
    digest = hashlib.sha256()
    for entry in entries:
        if entry["tile"] is not None:
            digest.update("\n".join(launches(product_of(entry), Tile.from_json(entry["tile"]))).encode() + b"\0")
    return digest.hexdigest()[:16]


def product_of(entry: dict[str, Any]) -> Product:
    """The product that an entry of a table is of."""
    key = tuple(entry[name] for name in _KEY)
    return _by_key().get(key) or Product("", *key[:2], *key[3:], dtype=key[2])


@functools.cache
def _by_key() -> dict[tuple[Any, ...], Product]:
    return {tuple(getattr(product, name) for name in _KEY): product for product in PRODUCTS}
