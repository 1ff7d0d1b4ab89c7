"""Tiles of the matrix products, and who makes a product: our kernel, or the library and a separate kernel.

`choose` asks, in this order:
1. the stored table of this device (`_gemm_table.py`), if it was made from the present kernels;
2. the heuristic, whose reasons are in docs/decisions/0008-gemm-choice.md:

    plain products, with or without bias                      library: nothing to fuse that it does not fuse itself
    fp32 operands, whatever follows                           library: three TF32 products for one are no match for it
    half precision, activation or accumulation                ours: saves a pass over the output, or more
    the same, where rows do not start at whole 16 bytes       library: our loads would not be 128 bits wide
    the same, fewer than _MIN_TILES tiles                     library: too little work to fill the device with

Kinds of processor, as for attention: sm_90 and sm_100 (operands from shared memory, copy engine), sm_80 (operands in
registers; NVIDIA's consumer chips too, so at most 99 KB of shared memory), gfx (AMD CDNA: 64 KB).
"""

import torch
from torch import Tensor

from bert_fast.kernels import _gemm_table
from bert_fast.kernels._gemm_launch import has_aligned_rows, layout_of, row_major
from bert_fast.kernels._gemm_table import Tile
from bert_fast.kernels._launch import architecture

__all__ = ["INTERPRETER_TILE", "Tile", "candidates", "choose"]

# Large enough that few programs run, small enough that several tiles and steps are there.
INTERPRETER_TILE = Tile(64, 64, 64, num_stages=2)
_MIN_TILES = 32

_HALF = {
    "sm_90": (Tile(128, 256, 64, 8, 3, halves=2), Tile(128, 128, 64, 8, 3, halves=2, resident=2)),
    "sm_100": (Tile(128, 256, 64, 8, 3, halves=2), Tile(128, 128, 64, 8, 3, halves=2, resident=2)),
    "sm_80": (Tile(128, 128, 32, 8, 3, resident=2),),
    "gfx": (Tile(128, 128, 32, 8, 2),),
}
_FP32 = {
    "sm_90": (Tile(64, 64, 32, 4, 2),),
    "sm_100": (Tile(64, 64, 32, 4, 2),),
    "sm_80": (Tile(64, 64, 32, 4, 2),),
    "gfx": (Tile(64, 64, 32, 4, 1),),
}


def _kind_of(name: str) -> str:
    return "gfx" if name.startswith("gfx") else name if name in ("sm_90", "sm_100") else "sm_80"


def candidates(name: str, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Tiles for a processor ("sm_90", "gfx942", ...) and dtype, the heuristic's choice first."""
    return (_FP32 if dtype == torch.float32 else _HALF)[_kind_of(name)]


def choose(kind: str, a: Tensor, b: Tensor) -> Tile | None:
    """The tile for our kernel, or None where the library makes this product; M, N, K >= 1."""
    (m, k), n = a.shape, b.shape[1]
    if a.is_cuda:
        table, _ = _gemm_table.stored(torch.cuda.get_device_name(a.device))
        found = table.find(kind, layout_of(a, b), a.dtype, m, n, k) if table is not None else None
        if found is not None:
            return found.tile
    return _by_heuristic(kind, a, b)


def _by_heuristic(kind: str, a: Tensor, b: Tensor) -> Tile | None:
    if kind == "plain" or a.dtype == torch.float32:
        return None
    if not (has_aligned_rows(row_major(a)[0]) and has_aligned_rows(row_major(b)[0])):
        return None
    return candidates(architecture(a.device), a.dtype)[0]
