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

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.kernels._embedding import RUNTIME, SIZES, Lookups, launch_config, looked_up, sum_of_lookups
from bert_fast.kernels._embedding_bwd import embedding_bwd
from bert_fast.kernels._launch import architecture, ceil_div, dropout_arguments, persistent_programs, register_limit
from bert_fast.kernels._launch_plan import launch_plan
from bert_fast.kernels._layer_norm import normalise, store_of_rows
from bert_fast.kernels._math import keep_values, row_major, split_seed
from bert_fast.kernels._programs import by_programs
from bert_fast.reference.embedding import Embedding

__all__ = ["embedding_bwd", "embedding_fwd", "launch_config"]


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
    # Parameters are addressed as tensors [T, H] of row stride 0, an argument lest Triton know it: it then loads them in
    # the layout of y, whatever their dtype, where a tile without rows would get its own layout and be exchanged.
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
