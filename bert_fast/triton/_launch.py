"""What launchers share: how rows are laid over threads, facts about devices, arguments as kernels take them."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from bert_fast.devices import chip
from bert_fast.reference.dropout import dropout_scale, dropout_threshold

_WARP = 32  # threads; where AMD has 64, a warp covers what two would
_MIN_WARPS = 4  # of a program: one for each scheduler of a multiprocessor
# Triton's interpreter runs programs one after another: two are enough to exercise every loop and partial sum.
_INTERPRETER_MULTIPROCESSORS = 2


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def _next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n; n >= 1."""
    return 1 << (n - 1).bit_length()


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors (compute units) of a CUDA or ROCm device, asked once; a stand-in for the interpreter."""
    if device.type != "cuda":
        return _INTERPRETER_MULTIPROCESSORS
    return chip(torch.cuda.current_device() if device.index is None else device.index).multiprocessors


# Of tensors on the CPU: the interpreter runs what this one would run.
_assumed_architecture: ContextVar[str] = ContextVar("assumed_architecture", default="sm_90")


@contextmanager
def assume_architecture(name: str) -> Iterator[None]:
    """Within the context, launchers choose for tensors on the CPU as they would on this processor ("sm_80", "gfx942").

    For compiling what a GPU that is not there would run.
    """
    token = _assumed_architecture.set(name)
    try:
        yield
    finally:
        _assumed_architecture.reset(token)


def assumed_architecture() -> str:
    """What launchers take tensors on the CPU for."""
    return _assumed_architecture.get()


def architecture(device: torch.device) -> str:
    """The processor's instruction set: "sm_80", "sm_86", "sm_90", ..., or AMD's name."""
    if device.type != "cuda":
        return _assumed_architecture.get()
    return chip(torch.cuda.current_device() if device.index is None else device.index).name


# What tiles are chosen for, by what a processor multiplies from and how much shared memory a program may take.
_KINDS = {
    "sm_80": "sm_80",  # operands in registers, 163 KB
    "sm_87": "sm_80",
    "sm_90": "sm_90",  # operands in shared memory, 227 KB
    "sm_100": "sm_100",
    "sm_103": "sm_100",
}


@functools.cache
def kind_of(architecture: str) -> str:
    """The kind of processor, a key of the tables of tiles: "sm_80", "sm_86", "sm_90", "sm_100" or "gfx" (AMD).

    sm_86 is what consumers' and workstations' cards are (sm_86, sm_89, sm_120): operands in registers, 99 KB. So is
    every one that nobody looked at: what fits there fits everywhere.
    """
    return "gfx" if architecture.startswith("gfx") else _KINDS.get(architecture, "sm_86")


def persistent_programs(num_groups: int, per_multiprocessor: int, device: torch.device, num_blocks: int = 1) -> int:
    """How many programs share `num_groups` groups of rows: all that run at once, fewer where as many rounds take fewer.

    The fewer there are, the fewer partial sums are left to a second stage. num_groups >= 1; num_blocks: blocks of
    columns that rows are cut into, each of which takes as many programs.
    """
    at_once = max(1, num_multiprocessors(device) * per_multiprocessor // num_blocks)
    return ceil_div(num_groups, ceil_div(num_groups, at_once))


def register_limit(registers: int, architecture: str) -> dict[str, int]:
    """The option of a launch that gives a thread up to so many registers, 0 for the compiler's choice.

    AMD's compiler knows none.
    """
    return {"maxnreg": registers} if registers and architecture.startswith("sm_") else {}


def unit_stride(x: Tensor) -> Tensor:
    """x [T, H] itself where neighbouring columns are neighbours in memory (rows may be anywhere), else a copy."""
    return x if x.stride(1) == 1 else x.contiguous()


@functools.lru_cache(maxsize=256)
def dropout_numbers(dropout_p: float) -> tuple[int, float]:
    """(drop_max, scale) of `triton/_math.py:keep_values`, drop_max as the signed 32-bit number with the same bits.

    Undefined for a threshold of 0 (p below 2**-17), where nothing is dropped: launchers then take the path without.
    """
    drop_max = (dropout_threshold(dropout_p) << 16) - 1
    return drop_max - (1 << 32) if drop_max >= 1 << 31 else drop_max, dropout_scale(dropout_p)


def dropout_arguments(
    dropout_p: float, seed: Tensor | None, coords: Tensor | None
) -> tuple[Tensor | None, Tensor | None, int, float]:
    """Seed and coords (None where nothing is dropped), drop_max and scale, as kernels take them."""
    if coords is None or dropout_threshold(dropout_p) == 0:
        return None, None, 0, 1.0
    return seed, coords.contiguous(), *dropout_numbers(dropout_p)


@dataclass(frozen=True)
class RowTile:
    """A tile [chunks, rows, chunk_cols] of whole rows: each row is cut into `chunks` chunks of neighbouring columns.

    Triton hands out threads along the fastest dimension first. So a chunk is what the threads of one row load at once,
    `vector` neighbouring columns each; the next threads take the next rows; and the chunks of a row lie in the
    registers of the same threads, where a sum over them needs no exchange.
    """

    vector: int  # neighbouring columns of one thread, 128 bits: 8 of bf16 and fp16, 4 of fp32
    chunks: int  # a power of two; chunks that lie wholly past the last column are dropped by the compiler
    rows: int
    chunk_cols: int
    num_warps: int

    @property
    def constants(self) -> dict[str, int]:
        """The tile as kernels take it; num_warps is an option of the launch."""
        return {"CHUNKS": self.chunks, "ROWS": self.rows, "CHUNK_COLS": self.chunk_cols, "VECTOR": self.vector}


def row_tile(hidden_size: int, dtype: torch.dtype, max_elements: int, best_elements: int) -> RowTile:
    """The tile for rows of `hidden_size` columns, with at most `max_elements` of a row in one thread.

    Of the numbers of threads per row that respect the limit, the one that pads the row least; among these, the one
    whose threads hold closest to `best_elements`. Examples for bf16 and at most 24: H = 768 is 3 chunks of 256 columns,
    a row to a warp; H = 1024 is 2 chunks of 512, a row to two warps; H = 384 is 3 chunks of 128, two rows to a warp.
    """
    vector = 16 // dtype.itemsize

    def elements(threads: int) -> int:
        return ceil_div(hidden_size, threads * vector) * vector

    # Fewer than 16 threads (256 bytes) on a row that has work for more would scatter the accesses of a warp.
    fewest = min(16, _next_power_of_2(ceil_div(hidden_size, vector)))
    candidates = [fewest << shift for shift in range(10)]
    threads = min(
        (count for count in candidates if elements(count) <= max_elements),
        key=lambda count: (elements(count) * count, abs(elements(count) - best_elements)),
    )
    num_warps = max(_MIN_WARPS, threads // _WARP)
    return RowTile(
        vector=vector,
        chunks=_next_power_of_2(elements(threads) // vector),
        rows=num_warps * _WARP // threads,
        chunk_cols=threads * vector,
        num_warps=num_warps,
    )
