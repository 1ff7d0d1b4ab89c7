"""Tiles of the attention kernels for every kind of processor, head size and dtype.

Chosen so that nothing spills (docs/kernels/ahead_of_time.md) and, among those that do not, for the fewest instructions
per score, two programs to a multiprocessor where registers allow. Kinds of processor:

    sm_90, sm_100   products read their operands from shared memory (HGMMA, tcgen05): tiles of 64 and more
    sm_80           products hold their operands in registers (HMMA): narrower tiles
    sm_86           the same on cards (sm_86, sm_89, sm_120), for which ptxas spills a little where it may choose how
                    many registers a thread has
    gfx             AMD CDNA: 4 waves may use 512 registers each

fp32 is there to be exact, not fast: TF32 in three terms costs each operand a dozen instructions.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from bert_fast.triton._launch import kind_of
from bert_fast.triton._launch_plan import LaunchByNames

SHORT_SEQLEN = 128  # tokens; docs/decisions/0007-attention-regimes.md


class Tile(NamedTuple):
    """One kernel's tile of scores and its launch: queries, keys, warps, and stages of the pipelined loop.

    max_registers: of a thread, where the compiler would rather spill a little than let another program in less; None
    leaves it the choice.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    @property
    def constants(self) -> dict[str, int]:
        """The tile as kernels take it, options of the launch included."""
        constants = {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }
        # AMD's compiler knows no such option.
        return constants if self.max_registers is None else constants | {"maxnreg": self.max_registers}


@dataclass(frozen=True)
class LaunchConfig:
    """Tiles of the three kernels for sequences of any length.

    has_plain: whether tiles without bounds and biases have a loop of their own. precision: of products of fp32.
    gradients: of the kernels for the gradients of bias and tables of relative positions. window: rows of the latter to
    a program.
    """

    forward: Tile
    dq: Tile
    dkdv: Tile
    has_plain: bool = True
    precision: str = "ieee"
    gradients: Tile | None = None
    window: int = 0


@dataclass(frozen=True)
class ShortConfig:
    """Tiles of the two kernels that hold a whole head; backward walks over its keys."""

    forward: Tile
    backward: Tile


_HALF = {
    # kind, at most this many columns
    ("sm_90", 64): LaunchConfig(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)),
    ("sm_90", 128): LaunchConfig(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    ("sm_100", 64): LaunchConfig(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("sm_100", 128): LaunchConfig(Tile(128, 64, 8, 2), Tile(64, 64, 4, 1), Tile(64, 64, 8, 1)),
    ("sm_80", 64): LaunchConfig(Tile(128, 64, 8, 2, 255), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
    ("sm_80", 128): LaunchConfig(Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 1)),
    ("sm_86", 64): LaunchConfig(Tile(128, 64, 8, 2, 255), Tile(64, 32, 4, 2, 255), Tile(64, 32, 4, 2, 255)),
    ("sm_86", 128): LaunchConfig(Tile(64, 32, 4, 2, 255), Tile(64, 32, 8, 2), Tile(32, 64, 8, 1)),
    ("gfx", 64): LaunchConfig(Tile(128, 64, 4, 1), Tile(128, 32, 4, 1), Tile(64, 32, 4, 1)),
    ("gfx", 128): LaunchConfig(Tile(128, 64, 4, 1), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1)),
}
# Where probabilities are dropped, random numbers keep a multiprocessor's arithmetic busy while tensor cores wait: two
# programs of four warps take turns where one of eight waits, and loads are asked for further ahead. Measured on sm_90
# alone, an H200 (docs/decisions/0007-attention-regimes.md).
_HALF_DROPOUT = {("sm_90", 64): LaunchConfig(Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 3))}
# Where backward reads the mask that forward stored, dq is that without dropout.
_HALF_STORED = {("sm_90", 64): LaunchConfig(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3))}
# A mask is stored where that was measured to save time: on an H200, for sequences of these lengths
# (docs/decisions/0006-attention-dropout.md); and for thresholds that `_attention._kept_halves` can compare with.
STORED_SEQLENS = range(SHORT_SEQLEN + 1, 2048 + 1)
STORED_THRESHOLDS = range(2, 0x7C00 + 1)
# With causality dk and dv take a third loop: a second stage, or wide tiles of wide heads, no longer fit.
_HALF_CAUSAL_DKDV = {
    ("sm_90", 64): Tile(64, 64, 4, 1),
    ("sm_90", 128): Tile(32, 32, 4, 1),
    ("sm_100", 64): Tile(64, 64, 4, 1),
}


def _fp32(forward: tuple[int, int, int], dq: tuple[int, int, int], dkdv: tuple[int, int, int]) -> LaunchConfig:
    """Tiles (queries, keys, warps) of fp32 on NVIDIA's processors."""
    return LaunchConfig(Tile(*forward, 1, 255), Tile(*dq, 1, 255), Tile(*dkdv, 1, 255), False, "tf32x3")


_FP32 = {
    32: _fp32((32, 32, 4), (16, 32, 2), (16, 32, 2)),
    64: _fp32((32, 32, 4), (16, 32, 4), (16, 32, 4)),
    128: _fp32((16, 32, 4), (16, 32, 4), (16, 32, 8)),
}
_FP32_GFX = LaunchConfig(Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), False)


def _extras(*tiles: tuple[int, ...], precision: str = "ieee", window: int = 0) -> LaunchConfig:
    """Tiles (queries, keys, warps, perhaps max_registers) of forward, dq, dkdv and gradients; nothing is pipelined."""
    forward, dq, dkdv, gradients = (Tile(*tile[:3], 1, *tile[3:]) for tile in tiles)
    return LaunchConfig(forward, dq, dkdv, False, precision, gradients, window)


# Positions and addresses of scores take registers; windows of tables and what is picked out of them take more: tiles
# are those that fit with two tables. fp32 with tables is multiplied without tensor cores: TF32's three terms of every
# window would not fit.
_BIAS = {
    # kind, dtype is fp32, at most this many columns
    ("sm", False, 64): _extras((64, 64, 8, 255), (64, 32, 8, 255), (64, 32, 8, 255), (32, 32, 8, 255)),
    ("sm_86", False, 64): _extras((64, 32, 8, 255), (32, 32, 8, 255), (64, 32, 8, 255), (32, 32, 8, 255)),
    ("sm", False, 128): _extras((64, 32, 8, 255), (32, 32, 8), (64, 32, 8), (16, 32, 4, 255)),
    ("sm", True, 64): _extras(
        (32, 32, 8, 255), (16, 32, 4, 255), (16, 32, 8, 255), (16, 32, 4, 255), precision="tf32x3"
    ),
    ("sm", True, 128): _extras(
        (16, 32, 4, 255), (16, 32, 4, 255), (16, 32, 8, 255), (16, 32, 4, 255), precision="tf32x3"
    ),
    ("gfx", False, 64): _extras((64, 32, 4), (64, 32, 4), (64, 32, 4), (64, 32, 4)),
    ("gfx", False, 128): _extras((64, 32, 4), (64, 32, 4), (64, 32, 4), (32, 32, 4)),
    ("gfx", True, 64): _extras((32, 32, 4), (32, 32, 4), (32, 32, 4), (32, 32, 4)),
    ("gfx", True, 128): _extras((32, 32, 4), (16, 32, 4), (32, 32, 4), (16, 32, 4)),
}
_TABLE = {
    ("sm", False, 64): _extras((32, 32, 8, 255), (32, 32, 8, 255), (32, 32, 8, 255), (32, 32, 8, 255), window=64),
    ("sm_80", False, 64): _extras((32, 32, 8, 255), (32, 32, 8, 255), (32, 32, 8, 255), (16, 32, 8, 255), window=64),
    ("sm", False, 128): _extras((32, 32, 8, 255), (32, 32, 8, 255), (32, 32, 8, 255), (16, 32, 8), window=32),
    ("sm_80", False, 128): _extras((32, 32, 8, 255), (32, 32, 8, 255), (32, 32, 8, 255), (16, 32, 8, 255), window=16),
    ("sm", True, 64): _extras((16, 32, 8, 255), (16, 32, 8, 255), (16, 32, 8, 255), (16, 32, 8, 255), window=16),
    ("sm", True, 128): _extras((16, 32, 8, 255), (16, 32, 8, 255), (16, 32, 8, 255), (16, 32, 8, 255), window=16),
    ("gfx", False, 64): _extras((32, 32, 4), (32, 32, 4), (32, 32, 4), (32, 32, 4), window=64),
    ("gfx", False, 128): _extras((32, 32, 4), (16, 32, 4), (32, 32, 4), (16, 32, 4), window=32),
    ("gfx", True, 64): _extras((32, 32, 4), (16, 32, 4), (16, 32, 4), (16, 32, 4), window=16),
    ("gfx", True, 128): _extras((16, 32, 4), (16, 32, 4), (16, 32, 4), (16, 32, 4), window=16),
}
_SHORT = {
    # kind, tokens
    ("sm_90", 32): ShortConfig(Tile(32, 32, 2, 1), Tile(32, 32, 2, 1)),
    ("sm_90", 64): ShortConfig(Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    ("sm_90", 128): ShortConfig(Tile(128, 128, 8, 1), Tile(128, 64, 8, 1)),
    ("sm_80", 32): ShortConfig(Tile(32, 32, 2, 1), Tile(32, 32, 2, 1)),
    ("sm_80", 64): ShortConfig(Tile(64, 64, 4, 1), Tile(64, 32, 4, 1, 255)),
    ("sm_80", 128): ShortConfig(Tile(128, 128, 8, 1), Tile(128, 32, 8, 1)),
    ("sm_86", 32): ShortConfig(Tile(32, 32, 2, 1, 255), Tile(32, 32, 2, 1, 255)),
    ("sm_86", 64): ShortConfig(Tile(64, 64, 4, 1), Tile(64, 32, 4, 1, 255)),
    ("sm_86", 128): ShortConfig(Tile(128, 128, 8, 1), Tile(128, 32, 8, 1, 255)),
    ("gfx", 32): ShortConfig(Tile(32, 32, 2, 1), Tile(32, 32, 2, 1)),
    ("gfx", 64): ShortConfig(Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    ("gfx", 128): ShortConfig(Tile(128, 128, 4, 1), Tile(128, 64, 4, 1)),
}


# Two programs to a multiprocessor, for four registers spilled: an H200, S = 128, 50 for 67 us.
_SHORT_DROPOUT = {("sm_90", 128): ShortConfig(Tile(128, 128, 8, 1, 128), Tile(128, 64, 8, 1))}


def block_d(head_dim: int) -> int:
    """Columns of a tile: the power of two that holds a head, at least the 16 that a tensor core takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


@functools.cache
def launch_config(
    head_dim: int, dtype: torch.dtype, architecture: str, is_causal: bool, has_dropout: bool, is_stored: bool = False
) -> LaunchConfig:
    """Tiles for heads of up to 128 columns of fp32, fp16 or bf16. architecture: as `_launch.architecture` says it.

    is_stored: whether dropout's mask is.
    """
    kind, columns = kind_of(architecture), 64 if head_dim <= 64 else 128
    if dtype == torch.float32:
        return _FP32_GFX if kind == "gfx" else _FP32[32 if head_dim <= 32 else columns]
    config = _HALF[kind, columns]
    if has_dropout:
        config = (_HALF_STORED if is_stored else _HALF_DROPOUT).get((kind, columns), config)
    if is_causal and (kind, columns) in _HALF_CAUSAL_DKDV:
        config = replace(config, dkdv=_HALF_CAUSAL_DKDV[kind, columns])
    return config


@functools.cache
def extras_config(head_dim: int, dtype: torch.dtype, architecture: str, has_tables: bool) -> LaunchConfig:
    """`launch_config` of calls with a bias or, has_tables, relative positions."""
    kind, tables = kind_of(architecture), _TABLE if has_tables else _BIAS
    is_fp32, columns = dtype == torch.float32, 64 if head_dim <= 64 else 128
    return tables.get((kind, is_fp32, columns)) or tables["gfx" if kind == "gfx" else "sm", is_fp32, columns]


def short_config(
    max_seqlen: int, head_dim: int, dtype: torch.dtype, architecture: str, has_dropout: bool
) -> ShortConfig | None:
    """The tiles for heads of up to `max_seqlen` queries and keys; None where none holds them."""
    if head_dim > 64 or dtype == torch.float32 or max_seqlen > SHORT_SEQLEN:
        return None
    return _short_config(32 if max_seqlen <= 32 else 64 if max_seqlen <= 64 else 128, architecture, has_dropout)


@functools.cache
def _short_config(tokens: int, architecture: str, has_dropout: bool) -> ShortConfig:
    kind = kind_of(architecture)
    config = _SHORT["sm_90" if kind == "sm_100" else kind, tokens]
    if has_dropout:
        config = _SHORT_DROPOUT.get((kind, tokens), config)
    return config


_known: dict[tuple[str, Tile], LaunchByNames] = {}


def kernel_by_names(kernel: Any, tile: Tile) -> LaunchByNames:
    """The plans of an attention kernel with this tile, made once."""
    found = _known.get((kernel.__name__, tile))
    if found is None:
        # Multiply-adds: the scale inside the exponential, delta, the accumulators.
        found = _known[kernel.__name__, tile] = LaunchByNames(kernel, **tile.constants, enable_fp_fusion=True)
    return found
