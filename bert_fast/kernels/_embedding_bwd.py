"""Backward of the embedding in Triton; formulas, shapes and bytes in `embedding.py`."""

from collections.abc import Set

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.kernels._column_sums import column_sums, launched_together
from bert_fast.kernels._embedding import RUNTIME, SIZES, Lookups, launch_config, looked_up, sum_of_lookups
from bert_fast.kernels._launch import ceil_div, dropout_arguments, persistent_programs, unit_stride
from bert_fast.kernels._launch_plan import launch_plan
from bert_fast.kernels._layer_norm import layer_norm_backward
from bert_fast.kernels._math import keep_values, row_major, split_seed
from bert_fast.kernels._programs import by_programs
from bert_fast.kernels._table_gradient import key_dtype, table_gradient
from bert_fast.reference.embedding import LOOKED_UP, Embedding

__all__ = ["embedding_bwd"]


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
