"""Tiles of the matrix products, and who makes a product: our kernel, or the library and a separate kernel.

`choose` asks, in this order:
1. whether our kernel is any good: for rows that start at whole 16 bytes, and to accumulate for fp32 results; else the
   library;
2. the stored table of this device (`_gemm_table.py`), if it was made from the present kernels;
3. the heuristic, whose reasons are in docs/decisions/0008-gemm-choice.md:

    plain products, bias, accumulation                        library: nothing to fuse that it does not fuse itself
    the same on AMD, fp32 results of half precision           ours: there the library rounds to half precision first
    fp32 operands, whatever follows                           library: three TF32 products for one are no match for it
    half precision, fewer than _MIN_ROWS rows                 library: our smallest tile would be mostly padding
    half precision, activations and derivatives               ours: saves a pass over the output, or more

`choose_for_weights` is asked within `batch_invariant`, where the order of a sum may depend on nothing but the sizes of
the weight and how matrices lie: always our kernel, never in parts of K, and without a table, whose choices are made for
numbers of tokens.

Kinds of processor, as for attention: sm_90 and sm_100 (operands from shared memory, copy engine), sm_80 and sm_86
(operands in registers; the same tiles for data centres' chips and for cards, so at most 99 KB of shared memory), gfx
(AMD CDNA: 64 KB). Chosen so that nothing spills (docs/kernels/ahead_of_time.md), under the oldest Triton neither.
"""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from bert_fast.kernels import _gemm_table
from bert_fast.kernels._gemm_launch import has_aligned_rows, layout_of, row_major
from bert_fast.kernels._gemm_table import Tile
from bert_fast.kernels._launch import architecture, ceil_div, kind_of, num_multiprocessors

__all__ = ["INTERPRETER_TILE", "Tile", "candidates", "choose", "choose_for_weights"]

# Large enough that few programs run, small enough that several tiles and steps are there.
INTERPRETER_TILE = Tile(64, 64, 64, num_stages=2)

# Candidates in half precision by role, in this order:
# wide    the most products for a byte of shared memory, one program to a multiprocessor: where K is long
# twin    two programs to a multiprocessor: one multiplies while the other finishes its tile
# third   sm_90: warps of their own for loads; elsewhere another shape of twin
# small   for outputs of few tiles
_OF_REGISTERS = (
    Tile(128, 128, 32, 8, 4, parts=2),
    # As many operands for a product as wide has, a warp's part being the same: 128 x 128 for 4 warps would spill.
    Tile(64, 128, 32, num_stages=4, parts=4, resident=2, max_registers=255),
    Tile(128, 64, 32, num_stages=4, parts=4, resident=2, max_registers=255),
    Tile(64, 64, 32, 4, 4, resident=2, max_registers=255),
)
_HALF = {
    "sm_90": (
        Tile(128, 256, 64, 8, 3, parts=4),
        Tile(128, 128, 64, 4, 3, parts=4, resident=2),
        Tile(128, 128, 64, 4, 4, warp_specialize=True),
        Tile(64, 128, 64, 4, 4, parts=2, resident=2),
    ),
    "sm_100": (
        Tile(128, 256, 64, 8, 3, parts=4),
        Tile(128, 128, 64, 4, 3, parts=4, resident=2),
        Tile(128, 128, 64, 8, 4, parts=4),
        Tile(64, 128, 64, 4, 3, parts=2, resident=2, max_registers=255),
    ),
    "sm_80": _OF_REGISTERS,
    "sm_86": _OF_REGISTERS,
    "gfx": (
        Tile(128, 128, 32, 8, 2),
        Tile(128, 128, 64, 4, 2),
        Tile(128, 64, 64, 4, 2),
        Tile(64, 64, 64, 4, 2),
    ),
}
# There to be exact, not fast: three terms of TF32 take a dozen instructions to make of each operand.
_FP32 = {
    "sm_90": (Tile(64, 64, 32, 4, 2),),
    "sm_100": (Tile(64, 64, 32, 4, 2),),
    "sm_80": (Tile(64, 64, 16, 4, 2, max_registers=255),),
    "sm_86": (Tile(64, 64, 16, 4, 2, max_registers=255),),
    "gfx": (Tile(64, 64, 32, 4, 2),),
}

_MIN_ROWS = 64
# Below this K the epilogue takes so large a part of a tile's time that hiding it outweighs the wider tile: a wide tile
# multiplies for 16 K clocks and finishes for 5,600 (GELU) to 9,200 (its derivative, GELU again, column sums); twins
# hide that, at four fifths of the rate, as they ask shared memory for 160 bytes a clock where it has 128.
_LONG_K = 2048
_MAX_SPLITS = 8
_MIN_STEPS_OF_A_SPLIT = 8


def candidates(name: str, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Tiles for a processor ("sm_90", "gfx942", ...) and dtype; in half precision wide, twin, third and small."""
    if dtype == torch.float32:
        return _FP32[kind_of(name)]
    return _HALF[kind_of(name)]


def choose(kind: str, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tile | None:
    """The tile with which our kernel makes a [M, K] @ b [K, N] and what follows; None: the library. M, N, K >= 1.

    kind: as in `_gemm_epilogue.py`. out_dtype: of the result, a's or fp32.
    """
    if kind == "accumulate" and out_dtype != torch.float32:
        return None
    table = None
    if a.is_cuda:
        table = _table_of(torch.cuda.current_device() if a.device.index is None else a.device.index)
    name = architecture(a.device)
    is_librarys = kind in _PLAIN and (out_dtype == a.dtype or name.startswith("sm_"))
    if table is None and is_librarys:
        return None
    if not (has_aligned_rows(row_major(a)[0]) and has_aligned_rows(row_major(b)[0])):
        return None
    (m, k), n = a.shape, b.shape[1]
    found = None if table is None else table.find(kind, layout_of(a, b), a.dtype, m, n, k)
    if found is not None:
        return found.tile
    return None if is_librarys else heuristic(kind, m, n, k, a.dtype, name, num_multiprocessors(a.device))


def choose_for_weights(kind: str, a: Tensor, b: Tensor) -> Tile:
    """The tile of our kernel for a [M, K] @ b [K, N] and what follows, whatever M is."""
    return _tile_for_weights(kind, b.shape[0], a.dtype, architecture(a.device))


@functools.lru_cache(maxsize=1024)
def _tile_for_weights(kind: str, k: int, dtype: torch.dtype, name: str) -> Tile:
    if dtype == torch.float32:
        return candidates(name, dtype)[0]
    wide, twin, *_ = candidates(name, dtype)
    return _of_many_rows(wide, twin, kind, k)


def _of_many_rows(wide: Tile, twin: Tile, kind: str, k: int) -> Tile:
    return wide if k >= _LONG_K or kind in _PLAIN else twin


_PLAIN = ("plain", "accumulate")  # kinds with nothing to fuse that the library does not fuse


@functools.cache
def _table_of(index: int) -> _gemm_table.Table | None:
    """The stored table of a CUDA device, if it can be used; asked once."""
    return _gemm_table.stored(torch.cuda.get_device_name(index))[0]


def heuristic(kind: str, m: int, n: int, k: int, dtype: torch.dtype, name: str, multiprocessors: int) -> Tile | None:
    """What to do where nothing was measured and there is something to fuse; name: of the processor."""
    if dtype == torch.float32 or m < _MIN_ROWS:
        return None
    wide, twin, _, small = candidates(name, dtype)
    tile = twin if k < _LONG_K and kind not in _PLAIN else wide
    if _num_tiles(tile, m, n) >= multiprocessors * tile.resident:
        return tile
    # Too few tiles to go round: smaller ones, and parts of K side by side where it is long.
    idle = multiprocessors * small.resident // _num_tiles(small, m, n)
    steps = ceil_div(k, small.block_k)
    splits = min(idle, _MAX_SPLITS, steps // _MIN_STEPS_OF_A_SPLIT)
    return replace(small, split_k=max(1, splits))


def _num_tiles(tile: Tile, m: int, n: int) -> int:
    return ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n)
