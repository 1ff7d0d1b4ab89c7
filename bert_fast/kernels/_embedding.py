"""What the forward and the backward kernel of the embedding share: lookups, their arguments, layouts."""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.kernels._launch import RowTile, ceil_div, row_tile, unit_stride
from bert_fast.kernels._math import row_major
from bert_fast.reference.embedding import Embedding

__all__ = ["RUNTIME", "SIZES", "LaunchConfig", "Lookups", "launch_config", "looked_up", "sum_of_lookups"]

# Arguments of both kernels that must not be compiled in: they vary, or would make a layout of their own.
RUNTIME = ["word_id_stride", "type_id_stride", "position_id_stride", "word_row_stride", "type_row_stride",
    "position_row_stride", "param_row_stride", "n_tokens", "n_words", "n_types", "n_positions", "drop_max",
    "site"]  # fmt: skip


@triton.jit
def looked_up(
    row,
    word_id_ptr,
    word_id_stride,
    n_words,
    type_id_ptr,
    type_id_stride,
    n_types,
    position_id_ptr,
    position_id_stride,
    n_positions,
    param_row_stride,
    WORDS_ARE_IDS: tl.constexpr,
    HAS_TYPES: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    """Rows of word, type and position table that the tokens `row` look up (int64, like row), and whether all exist.

    Where one does not exist the rows are 0: what is read there is not used.
    """
    word = row
    # Row 0, but not so that Triton knows: see param_col below.
    type_row = row * param_row_stride
    position = type_row
    exists = row >= 0
    if WORDS_ARE_IDS:
        word = tl.load(word_id_ptr + row * word_id_stride).to(tl.int64)
        exists &= (word >= 0) & (word < n_words)
    if HAS_TYPES:
        type_row = tl.load(type_id_ptr + row * type_id_stride).to(tl.int64)
        exists &= (type_row >= 0) & (type_row < n_types)
    if HAS_POSITIONS:
        position = tl.load(position_id_ptr + row * position_id_stride).to(tl.int64)
        exists &= (position >= 0) & (position < n_positions)
    return tl.where(exists, word, 0), tl.where(exists, type_row, 0), tl.where(exists, position, 0), exists


@triton.jit
def sum_of_lookups(
    word,
    type_row,
    position,
    mask_col,
    col,
    word_table_ptr,
    word_row_stride,
    type_table_ptr,
    type_row_stride,
    position_table_ptr,
    position_row_stride,
    STRIDE_UNIT: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    """h, fp32, 0 in masked columns."""
    # Strides count STRIDE_UNIT elements: seeing the factor, Triton knows that rows start at whole vectors.
    offset = word * word_row_stride * STRIDE_UNIT + col
    h = tl.load(row_major(word_table_ptr, offset, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
    offset = type_row * type_row_stride * STRIDE_UNIT + col
    h += tl.load(row_major(type_table_ptr, offset, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
    if HAS_POSITIONS:
        offset = position * position_row_stride * STRIDE_UNIT + col
        h += tl.load(row_major(position_table_ptr, offset, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
    return h


@dataclass(frozen=True)
class LaunchConfig:
    """How tokens of one width and dtype are laid over threads."""

    forward: RowTile
    forward_programs_per_multiprocessor: int
    forward_registers: int  # of a thread with dropout; 0: the compiler's choice
    backward: RowTile
    backward_programs_per_multiprocessor: int
    max_type_sums: int  # type tables of up to this many rows get their gradient from running sums


@functools.cache
def launch_config(hidden_size: int, table_dtype: torch.dtype, y_dtype: torch.dtype) -> LaunchConfig:
    """The configuration for rows of `hidden_size` columns, 1 to 8,192; y_dtype: of y or dy."""
    dtype = narrowest(table_dtype, y_dtype)
    # Forward: a row of up to 1,024 columns belongs to one warp, whose sums need neither shared memory nor a barrier.
    forward = row_tile(hidden_size, dtype, max_elements=32, best_elements=32)
    # Weight and bias stay in registers, beside three rows of the tables on their way. Half tables: up to 128 for 24
    # elements (16 warps fill the register file of 65,536), 168 for 32 (12 warps); fp32 tables: 168, and 255 (8 warps).
    elements = ceil_div(hidden_size, forward.chunk_cols) * forward.vector
    forward_warps = (16 if elements <= 24 else 12) - (4 if table_dtype.itemsize == 4 else 0)
    forward_programs = max(1, forward_warps // forward.num_warps)
    # Left alone, the compiler spills half-precision y of fp32 tables with dropout, for the sake of warps that nobody
    # launches, and Triton 3.6's takes too many for 32 elements: it gets the registers of those that run.
    most = min(65536 // 32 // (forward_programs * forward.num_warps) // 8 * 8, 255)
    forward_registers = most if y_dtype.itemsize == 2 and (table_dtype.itemsize == 4 or elements > 24) else 0
    # Backward: an element also costs a thread its weight and four running sums.
    # Rows that do not start at whole vectors are read element by element, and 24 addresses of each tensor would spill.
    most = 24 if hidden_size % (16 // dtype.itemsize) == 0 else 16
    backward = row_tile(hidden_size, dtype, max_elements=most, best_elements=16)
    elements = ceil_div(hidden_size, backward.chunk_cols) * backward.vector
    # Warps that the register file holds (65,536 registers): 8 of up to 255, 12 of up to 168. More programs would run
    # in a second, nearly empty round. The ahead-of-time gate checks the registers behind this.
    resident_warps = 12 if elements <= 16 and most == 24 and table_dtype.itemsize == 2 else 8
    # BERT has two types: two sums. Beyond 4,096 columns (16 warps of at most 128 registers) they would spill.
    max_type_sums = 2 if backward.num_warps < 16 else 0
    backward_programs = max(1, resident_warps // backward.num_warps)
    return LaunchConfig(forward, forward_programs, forward_registers, backward, backward_programs, max_type_sums)


def narrowest(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of fewest bytes: it decides how many neighbours a thread loads at once."""
    return min(dtypes, key=lambda dtype: dtype.itemsize)


# By fields, the letters of sizes that are numbers of a call, for its programs.
SIZES = {"words": "T T_", "token_type_ids": "T", "position_ids": "T", "coords": "T_"}


@dataclass(frozen=True)
class Lookups:
    """The lookups of one call, as both kernels take them."""

    tensors: tuple[Tensor | None, ...]  # ids of words, types, positions; tables (words: or vectors)
    id_strides: tuple[int, int, int]
    row_strides: tuple[int, int, int]  # in elements
    sizes: tuple[int, int, int]  # rows of the tables
    flags: dict[str, bool]

    @classmethod
    def of(cls, a: Embedding) -> "Lookups":
        """Copies are made only of tables and vectors whose neighbouring columns are not neighbours in memory."""
        are_ids = a.word_source == "word_table"
        position_ids = None if a.position_table is None else a.position_ids
        ids = (a.words if are_ids else None, a.token_type_ids, position_ids)
        tables = tuple(
            None if t is None else unit_stride(t) for t in (getattr(a, a.word_source), a.type_table, a.position_table)
        )
        return cls(
            (*ids, *tables),
            # Programs give a single id, which is always contiguous, the stride 1.
            tuple(0 if t is None else 1 if t.is_contiguous() else t.stride(0) for t in ids),  # type: ignore[arg-type]
            tuple(0 if t is None else t.stride(0) for t in tables),  # type: ignore[arg-type]
            tuple(0 if t is None else t.shape[0] for t in tables),  # type: ignore[arg-type]
            {
                "WORDS_ARE_IDS": are_ids,
                "HAS_TYPES": a.token_type_ids is not None,
                "HAS_POSITIONS": position_ids is not None,
            },
        )

    def stride_unit(self, vector: int, *more: int) -> int:
        """The largest divisor of the vector width that divides all row strides."""
        return math.gcd(vector, *self.row_strides, *more)

    def strides(self, stride_unit: int) -> tuple[int, ...]:
        """Kernel arguments word_id_stride to param_row_stride."""
        return (*self.id_strides, *(stride // stride_unit for stride in self.row_strides), 0)
