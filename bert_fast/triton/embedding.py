"""y = dropout(LayerNorm(word_table[id] + type_table[token type] + position_table[position])) in Triton.

Forward, per token:
    h    = word + type + position               rows of the tables (word: or a vector given in place of an id)
    mean = sum(h) / H;   rstd = 1 / sqrt(sum((h - mean)^2) / H + eps)
    y    = ((h - mean) * rstd * weight + bias) * m        m = scale where kept, else 0; 1 without dropout

Backward, with n = (h - mean) * rstd, dn = dy * m and g = dn * weight, h looked up again:
    dh = rstd * (g - sum(g) / H - n * sum(g * n) / H)
    dweight = sum over tokens of dn * n;   dbias = sum of dn
    dtable[r] = sum of dh over the tokens that looked up row r

Source: Devlin et al. 2019 (arXiv:1810.04805), figure 2; derivation in docs/kernels/embedding.md.

Shapes: y, dy, dh [T, H]; word, position and type table [V, H], [M, H], [K, H]; ids, mean, rstd [T]; weight, bias [H].
Bytes moved, y and dy of e bytes an element, tables and dh of t bytes, ids of i bytes, k = 2 or 4 bytes a sort key:
    forward        reads, per token, the word row and ids, coords: H t + 3 i + 8; writes y, mean, rstd: H e + 8.
                   Rows of positions and types come from cache, (M + K) H t once; parameters once per program
    backward rows  reads dy, the word row, mean, rstd, ids, coords: H e + H t + 3 i + 16; writes dh and keys:
                   H t + 2 k; once per program (2 + K) 4 H bytes of partial sums, written and read again
    tables         `_table_gradient.py`, for words and for positions: reads dh, H t per token; writes V H t, M H t
Saved: ids, mean, rstd. Recomputed: h, and the mask, from the seed.
Precision: loads are widened to fp32 at once; statistics, sums and all arithmetic are fp32. dh is rounded to the dtype
of the tables, in which autograd would keep it too; each table row is rounded once more, as a sum.
Determinism: no atomics; sums are taken in an order that depends on T, the ids and the device alone.

A token with an id outside its table looks nothing up: its row of y is NaN, and it counts in no gradient.
Tiles are [CHUNKS, ROWS, CHUNK_COLS], as `_launch.py:RowTile` explains: a row belongs to one warp, or few.
"""

import functools
import math
from collections.abc import Set
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.reference.embedding import LOOKED_UP, Embedding
from bert_fast.triton._column_sums import column_sums, launched_together
from bert_fast.triton._launch import (
    RowTile,
    architecture,
    ceil_div,
    dropout_arguments,
    persistent_programs,
    register_limit,
    row_tile,
    unit_stride,
)
from bert_fast.triton._launch_plan import launch_plan
from bert_fast.triton._layer_norm import layer_norm_backward, normalise, store_of_rows
from bert_fast.triton._math import keep_values, row_major, split_seed
from bert_fast.triton._programs import by_programs
from bert_fast.triton._table_gradient import key_dtype, table_gradient

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
    # For half-precision y of fp32 tables with dropout the compiler would spill registers, to leave room for warps that
    # are not launched; for 32 elements Triton 3.6's compiler would take more than there are for the warps that are. So
    # the launch says how many registers a thread may have: as many as the warps that run leave it.
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


@triton.jit(do_not_specialize=RUNTIME)
def _embedding_fwd_kernel(
    word_id_ptr,
    type_id_ptr,
    position_id_ptr,
    word_table_ptr,
    type_table_ptr,
    position_table_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    coords_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    word_id_stride,
    type_id_stride,
    position_id_stride,
    word_row_stride,
    type_row_stride,
    position_row_stride,
    param_row_stride,
    n_tokens,
    n_words,
    n_types,
    n_positions,
    eps,
    scale,
    drop_max,
    site,
    N_COLS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WORDS_ARE_IDS: tl.constexpr,
    HAS_TYPES: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Every num_programs-th group of ROWS tokens."""
    chunk_start = tl.arange(0, CHUNKS)[:, None, None] * CHUNK_COLS  # [CHUNKS, 1, 1]
    col = chunk_start + tl.arange(0, CHUNK_COLS)[None, None, :]  # [CHUNKS, 1, CHUNK_COLS]
    mask_col = col < N_COLS
    vector_col = (chunk_start + tl.arange(0, CHUNK_COLS // VECTOR)[None, None, :] * VECTOR).to(tl.uint32)
    tile_row = tl.arange(0, ROWS)[None, :, None].to(tl.int64)  # offsets pass 2^31 where row numbers do not
    # Parameters are addressed as tensors [T, H] of row stride 0. The stride is an argument, so that Triton does not see
    # the 0: it then loads parameters in the layout of y, whatever their dtype. A tile without rows would get a layout
    # of its own and be exchanged.
    param_col = tile_row * param_row_stride * STRIDE_UNIT + col
    weight = tl.load(row_major(weight_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
    bias = tl.load(row_major(bias_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))

    for group in tl.range(tl.program_id(0), tl.cdiv(n_tokens, ROWS), tl.num_programs(0)):
        row = group * ROWS + tile_row
        mask_row = row < n_tokens
        # In place of tokens past the last one the last is looked up: loads without a mask need no zeroed registers.
        token = tl.minimum(row, n_tokens - 1)
        word, type_row, position, exists = looked_up(
            token, word_id_ptr, word_id_stride, n_words, type_id_ptr, type_id_stride, n_types,
            position_id_ptr, position_id_stride, n_positions, param_row_stride, WORDS_ARE_IDS, HAS_TYPES, HAS_POSITIONS,
        )  # fmt: skip
        h = sum_of_lookups(
            word, type_row, position, mask_col, col, word_table_ptr, word_row_stride,
            type_table_ptr, type_row_stride, position_table_ptr, position_row_stride, STRIDE_UNIT, HAS_POSITIONS,
        )  # fmt: skip
        centred, mean, rstd = normalise(h, mask_col, eps, N_COLS)
        mean = tl.where(exists, mean, float("nan"))
        rstd = tl.where(exists, rstd, float("nan"))  # and with it the row of y
        store_of_rows(mean_ptr, row, mean, mask_row, CHUNK_COLS // VECTOR)
        y = centred * rstd * weight + bias
        if HAS_DROPOUT:
            batch_row = tl.load(coords_ptr + token * 2).to(tl.uint32)
            batch_col = tl.load(coords_ptr + token * 2 + 1).to(tl.uint32)
            keep = keep_values(
                k0, k1, site.to(tl.uint32), batch_row, batch_col, vector_col, drop_max.to(tl.uint32), VECTOR
            )
            y *= tl.where(keep, scale, 0.0)  # a product, so that NaN stays NaN
        tl.store(row_major(y_ptr, row * N_COLS + col, N_COLS), y.to(y_ptr.dtype.element_ty), mask=mask_row & mask_col)
        store_of_rows(rstd_ptr, row, rstd, mask_row, CHUNK_COLS // VECTOR)


@by_programs(Embedding, SIZES, integers=("site",))
def embedding_fwd(a: Embedding) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the forward kernel: (y, mean, rstd), as `reference.embedding`.

    Tables, vectors and y of fp32, fp16 or bf16, H <= 8,192; ids of int32 or int64, strided or expanded. Returns new,
    contiguous tensors. A token with an id outside its table gets a row of NaN.
    """
    lookups = Lookups.of(a)
    num_tokens, hidden_size, device = a.words.shape[0], a.type_table.shape[1], a.words.device
    y = a.words.new_empty((num_tokens, hidden_size), dtype=a.out_dtype)
    mean, rstd = (a.words.new_empty(num_tokens, dtype=torch.float32) for _ in range(2))
    if num_tokens == 0:
        return y, mean, rstd
    config = launch_config(hidden_size, a.type_table.dtype, y.dtype)
    tile = config.forward
    num_programs = persistent_programs(
        ceil_div(num_tokens, tile.rows), config.forward_programs_per_multiprocessor, device
    )
    seed, coords, drop_max, scale = dropout_arguments(a.dropout_p, a.seed, a.coords)
    stride_unit = lookups.stride_unit(tile.vector)
    launch_plan(
        _embedding_fwd_kernel,
        N_COLS=hidden_size,
        CHUNKS=tile.chunks,
        ROWS=tile.rows,
        CHUNK_COLS=tile.chunk_cols,
        VECTOR=tile.vector,
        STRIDE_UNIT=stride_unit,
        **lookups.flags,
        HAS_DROPOUT=coords is not None,
        num_warps=tile.num_warps,
        **register_limit(config.forward_registers if coords is not None else 0, architecture(device)),
        enable_fp_fusion=True,  # centred * rstd * weight + bias
    )(
        (num_programs,),
        (*lookups.tensors, a.weight.contiguous(), a.bias.contiguous(), seed, coords, y, mean, rstd),
        (*lookups.strides(stride_unit), num_tokens, *lookups.sizes, a.eps, scale, drop_max, a.site),
    )
    return y, mean, rstd


@triton.jit
def _store_halves(ptr, row, x, mask_row, N_COLS: tl.constexpr):
    """Stores rows x (fp32 [CHUNKS, ROWS, CHUNK_COLS], 8 neighbours in a thread) in two halves of every 8 neighbours.

    Triton stores 128 bits a thread, 4 neighbours: it would lay the tile over threads anew, through shared memory.
    """
    chunks: tl.constexpr = x.shape[0]
    rows: tl.constexpr = x.shape[1]
    cols: tl.constexpr = x.shape[2]
    halves = tl.permute(tl.reshape(x, [chunks, rows, cols // 8, 2, 4]), (0, 1, 2, 4, 3))
    lower, upper = tl.split(halves)
    place = tl.arange(0, cols // 2)[None, None, :]
    col = tl.arange(0, chunks)[:, None, None] * cols + (place // 4) * 8 + place % 4
    offset = row * N_COLS + col
    # 2 for rows: as in `row_major`.
    lower_ptr = tl.max_contiguous(ptr + offset, [1, min(2 - N_COLS % 2, rows), 4])
    upper_ptr = tl.max_contiguous(ptr + (offset + 4), [1, min(2 - N_COLS % 2, rows), 4])
    tl.store(lower_ptr, tl.reshape(lower, [chunks, rows, cols // 2]), mask=mask_row & (col < N_COLS))
    tl.store(upper_ptr, tl.reshape(upper, [chunks, rows, cols // 2]), mask=mask_row & (col + 4 < N_COLS))


@triton.jit(do_not_specialize=[*RUNTIME, "dy_row_stride"])
def _embedding_bwd_kernel(
    dy_ptr,
    word_id_ptr,
    type_id_ptr,
    position_id_ptr,
    word_table_ptr,
    type_table_ptr,
    position_table_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    seed_ptr,
    coords_ptr,
    dh_ptr,
    word_key_ptr,
    type_key_ptr,
    position_key_ptr,
    partial_ptr,
    type_partial_ptr,
    dy_row_stride,
    word_id_stride,
    type_id_stride,
    position_id_stride,
    word_row_stride,
    type_row_stride,
    position_row_stride,
    param_row_stride,
    n_tokens,
    n_words,
    n_types,
    n_positions,
    scale,
    drop_max,
    site,
    N_COLS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WORDS_ARE_IDS: tl.constexpr,
    HAS_TYPES: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    TYPE_SUMS: tl.constexpr,
):
    """Every num_programs-th group of ROWS tokens, then the program's sums over its tokens.

    dh ([T, N_COLS] or None); *_key ([T] or None): the row that a token looked up, the number of rows where it looks
    nothing up. partial (fp32 [num_programs, 2, N_COLS]): sums for dweight and dbias; type_partial (fp32 [num_programs,
    TYPE_SUMS, N_COLS] or None): of dh over the tokens of each type.
    """
    chunk_start = tl.arange(0, CHUNKS)[:, None, None] * CHUNK_COLS  # [CHUNKS, 1, 1]
    col = chunk_start + tl.arange(0, CHUNK_COLS)[None, None, :]  # [CHUNKS, 1, CHUNK_COLS]
    mask_col = col < N_COLS
    vector_col = (chunk_start + tl.arange(0, CHUNK_COLS // VECTOR)[None, None, :] * VECTOR).to(tl.uint32)
    tile_row = tl.arange(0, ROWS)[None, :, None].to(tl.int64)  # offsets pass 2^31 where row numbers do not
    param_col = tile_row * param_row_stride * STRIDE_UNIT + col  # as in forward
    weight = tl.load(row_major(weight_ptr, param_col, STRIDE_UNIT), mask=mask_col, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
        weight *= scale
    dweight = tl.zeros([CHUNKS, ROWS, CHUNK_COLS], tl.float32)
    dbias = tl.zeros([CHUNKS, ROWS, CHUNK_COLS], tl.float32)
    dtype0 = tl.zeros([CHUNKS, ROWS, CHUNK_COLS], tl.float32)
    dtype1 = tl.zeros([CHUNKS, ROWS, CHUNK_COLS], tl.float32)

    for group in tl.range(tl.program_id(0), tl.cdiv(n_tokens, ROWS), tl.num_programs(0)):
        row = group * ROWS + tile_row
        mask_row = row < n_tokens
        token = tl.minimum(row, n_tokens - 1)  # as in forward
        word, type_row, position, exists = looked_up(
            token, word_id_ptr, word_id_stride, n_words, type_id_ptr, type_id_stride, n_types,
            position_id_ptr, position_id_stride, n_positions, param_row_stride, WORDS_ARE_IDS, HAS_TYPES, HAS_POSITIONS,
        )  # fmt: skip
        # Where nothing is looked up dn and rstd are 0, hence dh, and nothing is added to any sum.
        exists &= mask_row
        mask = exists & mask_col
        dn = tl.load(row_major(dy_ptr, row * dy_row_stride * STRIDE_UNIT + col, STRIDE_UNIT), mask=mask, other=0.0).to(
            tl.float32
        )
        h = sum_of_lookups(
            word, type_row, position, mask_col, col, word_table_ptr, word_row_stride,
            type_table_ptr, type_row_stride, position_table_ptr, position_row_stride, STRIDE_UNIT, HAS_POSITIONS,
        )  # fmt: skip
        mean = tl.load(mean_ptr + row, mask=exists, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=exists, other=0.0)
        if word_key_ptr is not None:
            key = tl.where(exists, word, n_words)
            tl.store(word_key_ptr + row, key.to(word_key_ptr.dtype.element_ty), mask=mask_row)
        if type_key_ptr is not None:
            key = tl.where(exists, type_row, n_types)
            tl.store(type_key_ptr + row, key.to(type_key_ptr.dtype.element_ty), mask=mask_row)
        if position_key_ptr is not None:
            key = tl.where(exists, position, n_positions)
            tl.store(position_key_ptr + row, key.to(position_key_ptr.dtype.element_ty), mask=mask_row)
        if HAS_DROPOUT:
            batch_row = tl.load(coords_ptr + row * 2, mask=mask_row, other=0).to(tl.uint32)
            batch_col = tl.load(coords_ptr + row * 2 + 1, mask=mask_row, other=0).to(tl.uint32)
            keep = keep_values(
                k0, k1, site.to(tl.uint32), batch_row, batch_col, vector_col, drop_max.to(tl.uint32), VECTOR
            )
            dn = tl.where(keep, dn, 0.0)  # scaled with weight, and in the sums at the end
        n = (h - mean) * rstd
        dh = layer_norm_backward(dn * weight, n, rstd, N_COLS)
        if dh_ptr is not None:
            if VECTOR == 8 and dh_ptr.dtype.element_ty == tl.float32:
                _store_halves(dh_ptr, row, dh, mask_row, N_COLS)
            else:
                tl.store(
                    row_major(dh_ptr, row * N_COLS + col, N_COLS),
                    dh.to(dh_ptr.dtype.element_ty),
                    mask=mask_row & mask_col,
                )
        # The selections tell the compiler that the sums of a chunk past the last column stay 0: it then gives them no
        # registers.
        dweight += tl.where(mask_col, dn * n, 0.0)
        dbias += tl.where(mask_col, dn, 0.0)
        if TYPE_SUMS == 1:
            dtype0 += tl.where(mask_col, dh, 0.0)
        if TYPE_SUMS == 2:
            # Factors 0 and 1 make each sum one instruction, selections two; a dh that is not finite shows in both.
            is_type1 = type_row.to(tl.float32)
            dtype0 += tl.where(mask_col, dh * (1.0 - is_type1), 0.0)
            dtype1 += tl.where(mask_col, dh * is_type1, 0.0)

    sum_col = tl.arange(0, CHUNKS)[:, None] * CHUNK_COLS + tl.arange(0, CHUNK_COLS)[None, :]  # [CHUNKS, CHUNK_COLS]
    mask_sum = sum_col < N_COLS
    program = tl.program_id(0).to(tl.int64)
    sum_ptr = partial_ptr + program * (2 * N_COLS) + sum_col
    factor = scale if HAS_DROPOUT else 1.0
    tl.store(sum_ptr, tl.sum(dweight, 1) * factor, mask=mask_sum)
    tl.store(sum_ptr + N_COLS, tl.sum(dbias, 1) * factor, mask=mask_sum)
    if TYPE_SUMS >= 1:
        tl.store(type_partial_ptr + program * (TYPE_SUMS * N_COLS) + sum_col, tl.sum(dtype0, 1), mask=mask_sum)
    if TYPE_SUMS == 2:
        tl.store(type_partial_ptr + program * (2 * N_COLS) + N_COLS + sum_col, tl.sum(dtype1, 1), mask=mask_sum)


@by_programs(
    Embedding, SIZES | {"dy": "T_", "mean": "T", "rstd": "T"}, "dy", "mean", "rstd", "wants", integers=("site",)
)
def embedding_bwd(
    a: Embedding, dy: Tensor, mean: Tensor, rstd: Tensor, wants: Set[str] = LOOKED_UP
) -> dict[str, Tensor]:
    """Launches the row kernel, its sums and the table gradients: gradients by name, as `reference.embedding`.

    dy [T, H] of fp32, fp16 or bf16, strided or expanded.
    """
    lookups, dy = Lookups.of(a), unit_stride(dy)
    num_tokens, hidden_size, device = a.words.shape[0], a.type_table.shape[1], a.words.device
    num_words, num_types, num_positions = lookups.sizes
    wants = wants & {a.word_source, "type_table", *(() if a.position_table is None else ("position_table",))}
    if num_tokens == 0:
        return {name: torch.zeros_like(getattr(a, name)) for name in wants} | {
            name: torch.zeros_like(a.weight) for name in ("weight", "bias")
        }
    # Without types only row 0 was looked up: one sum, whatever the size of the table.
    type_sums = 0 if "type_table" not in wants else 1 if a.token_type_ids is None else num_types
    config = launch_config(hidden_size, a.type_table.dtype, dy.dtype)
    tile = config.backward
    has_type_keys = type_sums > config.max_type_sums
    if has_type_keys:
        type_sums = 0

    def keys(is_needed: bool, num_rows: int) -> Tensor | None:
        return dy.new_empty(num_tokens, dtype=key_dtype(num_rows)) if is_needed else None

    word_keys, type_keys = keys("word_table" in wants, num_words), keys(has_type_keys, num_types)
    position_keys = keys("position_table" in wants, num_positions)
    dh = None
    if has_type_keys or wants - {"type_table"}:
        dh = dy.new_empty((num_tokens, hidden_size), dtype=a.type_table.dtype)

    # Fewer programs also mean less to reduce.
    num_programs = persistent_programs(
        ceil_div(num_tokens, tile.rows), config.backward_programs_per_multiprocessor, device
    )
    partial = dy.new_empty((num_programs, 2, hidden_size), dtype=torch.float32)
    type_partial = dy.new_empty((num_programs, 1, type_sums * hidden_size), dtype=torch.float32)
    seed, coords, drop_max, scale = dropout_arguments(a.dropout_p, a.seed, a.coords)
    stride_unit = lookups.stride_unit(tile.vector, dy.stride(0))
    launch_plan(
        _embedding_bwd_kernel,
        N_COLS=hidden_size,
        CHUNKS=tile.chunks,
        ROWS=tile.rows,
        CHUNK_COLS=tile.chunk_cols,
        VECTOR=tile.vector,
        STRIDE_UNIT=stride_unit,
        **lookups.flags,
        HAS_DROPOUT=coords is not None,
        TYPE_SUMS=type_sums,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,  # g - mean(g) - n * mean(g n), and the running sums
    )(
        (num_programs,),
        (
            dy,
            *lookups.tensors,
            mean,
            rstd,
            a.weight.contiguous(),
            seed,
            coords,
            dh,
            word_keys,
            type_keys,
            position_keys,
            partial,
            type_partial if type_sums else None,
        ),
        (
            dy.stride(0) // stride_unit,
            *lookups.strides(stride_unit),
            num_tokens,
            *lookups.sizes,
            scale,
            drop_max,
            a.site,
        ),
    )
    with launched_together():
        made = dict(zip(("weight", "bias"), column_sums(partial, a.weight.dtype), strict=True))
        of_types = column_sums(type_partial, a.type_table.dtype)[0] if type_sums else None
    if has_type_keys:
        made["type_table"] = table_gradient(dh, type_keys, num_types)
    elif of_types is not None:
        sums, is_whole = of_types.view(type_sums, hidden_size), type_sums == num_types
        made["type_table"] = sums if is_whole else torch.nn.functional.pad(sums, (0, 0, 0, num_types - type_sums))
    if "word_table" in wants:
        made["word_table"] = table_gradient(dh, word_keys, num_words, a.padding_idx)
    elif "words" in wants:
        assert dh is not None
        made["words"] = dh.to(a.words.dtype)
    if "position_table" in wants:
        made["position_table"] = table_gradient(dh, position_keys, num_positions)
    return made
