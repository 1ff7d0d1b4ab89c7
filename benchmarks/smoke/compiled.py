"""What Triton compiled in this process: how long it took, and what the driver says of registers and spills."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.kit.programs import files, kernel_names

WORD = 4  # bytes: Triton counts what is spilled in these


class CompiledKernels:
    """The compiled kernels of bert_fast that were not told of before; `seconds` by Triton's hash of each."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._told: set[str] = set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the context, how long each compilation takes is noted; a kernel from Triton's cache takes next to no
        time.
        """
        try:
            from triton import knobs
        except ImportError:
            yield
            return
        before, knobs.compilation.listener = knobs.compilation.listener, self._note
        try:
            yield
        finally:
            knobs.compilation.listener = before

    def _note(self, *, metadata: dict[str, Any], times: Any, **_: Any) -> None:
        self._seconds[metadata["hash"]] = times.total / 1e6

    def new(self) -> list[dict[str, Any]]:
        """Kernel, compile_s, registers of a thread, spill_bytes of a thread, shared_bytes of a block, warps."""
        told = []
        for one in _loaded():
            if one.hash not in self._told:
                self._told.add(one.hash)
                told.append({
                    "kernel": one.metadata.name,
                    "compile_s": round(self._seconds.get(one.hash, 0.0), 2),
                    "registers": one.n_regs,
                    "spill_bytes": None if one.n_spills is None else WORD * one.n_spills,
                    "shared_bytes": one.metadata.shared,
                    "warps": one.metadata.num_warps,
                })  # fmt: skip
        return told


def _loaded() -> Iterator[Any]:
    """Every compiled kernel of the package that this process has."""
    for file in files():
        module = sys.modules.get(f"bert_fast.triton.{file}")
        for name in kernel_names(file) if module is not None else ():
            for cache, *_ in getattr(getattr(module, name), "device_caches", {}).values():
                yield from (one for one in cache.values() if hasattr(one, "n_regs"))
