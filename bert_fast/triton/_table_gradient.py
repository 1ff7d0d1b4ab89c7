"""The gradient of an embedding table: every row the sum of dh over the tokens that looked it up, without atomics.

    dtable[v] = sum over tokens t with key[t] == v of dh[t]            0 where no token looked v up

Tokens are sorted by key (stably), so those of one row are a segment of the sorted order. A segment may hold no token,
as most rows of a vocabulary do, or nearly all ([CLS], [SEP], "the"), and one program summing thousands of tokens would
be waited for by all the others. So sums are taken in two stages:

1. pieces: the sorted order is cut into blocks of PIECE tokens. A block that lies inside one segment is summed at once.
2. rows: every row of the table is owned by one program, which adds the pieces of its segment and the fewer than
   2 PIECE tokens before and behind them, and writes the row: zeros where the segment is empty.

Example, PIECE = 4: keys 2 2 2 | 5 5 5 5 5 5 5 5 5 ... sorted give blocks [2 2 2 5] [5 5 5 5] [5 5 5 5]: two pieces. Row
2 adds three tokens; row 5 adds one token, two pieces, and what follows; rows 0, 1, 3, 4 are written as zeros.

Bytes moved, for T tokens, V rows of H columns, dh of e bytes an element (the floor: the first two terms):
    T H e read, V H e written; pieces at most 4 T H / PIECE written and read again; 16 T (order, keys), 8 V (starts)
The sort is torch.sort on keys of 16 bits where V < 32,768, else 32: two or four radix passes on the device.
Precision: sums in fp32, rounded once. Determinism: the order of additions depends on the keys alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.triton._launch import ceil_div
from bert_fast.triton._launch_plan import launch_plan

# Tokens summed by one program of the first stage: a row's owner then reads fewer than 64 tokens by itself, and pieces
# add at most 8 / 32 bytes per element of dh.
PIECE = 32
# Tokens (or pieces) loaded at once: 8 x 512 bytes of bf16 in flight for each warp, of which 32 fit a multiprocessor.
_ITEMS = 8
_STARTS_BLOCK = 256
# A program owns several rows of a vocabulary, of which most are empty and written in one go; the rows of a small table
# (positions) are all long, so each has its own program.
_SMALL_TABLE, _ROWS_OF_LARGE_TABLE = 4096, 4


@triton.jit(do_not_specialize=["n_tokens", "n_rows", "n_steps"])
def _segment_starts_kernel(key_ptr, start_ptr, n_tokens, n_rows, n_steps, BLOCK: tl.constexpr):
    """start[v] = number of keys below v, for v from 0 to n_rows: binary search, n_steps halvings of n_tokens."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + n_tokens
    for _ in tl.range(0, n_steps):
        middle = low + (high - low) // 2
        is_open = low < high
        is_below = is_open & (tl.load(key_ptr + middle, mask=is_open, other=0).to(tl.int32) < row)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
    tl.store(start_ptr + row, low, mask=row <= n_rows)


@triton.jit
def _sum_of_rows(dh_ptr, order_ptr, item, mask_item, col, mask_col, N_COLS: tl.constexpr):
    """Sum over the sorted tokens `item` ([ITEMS], where mask_item) of their rows of dh, columns col: fp32 [COLS]."""
    token = tl.load(order_ptr + item, mask=mask_item, other=0)
    mask = mask_item[:, None] & mask_col[None, :]
    tile = tl.load(dh_ptr + token.to(tl.int64)[:, None] * N_COLS + col[None, :], mask=mask, other=0.0)
    return tl.sum(tile.to(tl.float32), 0)


@triton.jit(do_not_specialize=["n_rows", "skipped_row"])
def _segment_pieces_kernel(
    dh_ptr,
    key_ptr,
    order_ptr,
    piece_ptr,
    n_rows,
    skipped_row,
    N_COLS: tl.constexpr,
    COLS: tl.constexpr,
    ITEMS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Columns COLS of one block of PIECE sorted tokens, if they share one key of the table (and not skipped_row)."""
    n_col_blocks: tl.constexpr = (N_COLS + COLS - 1) // COLS
    block = (tl.program_id(0) // n_col_blocks).to(tl.int64)
    col = tl.program_id(0) % n_col_blocks * COLS + tl.arange(0, COLS)
    mask_col = col < N_COLS
    first = tl.load(key_ptr + block * PIECE).to(tl.int32)
    last = tl.load(key_ptr + block * PIECE + (PIECE - 1)).to(tl.int32)
    if (first == last) & (first >= 0) & (first < n_rows) & (first != skipped_row):
        total = tl.zeros([COLS], tl.float32)
        for start in tl.static_range(0, PIECE, ITEMS):
            item = block * PIECE + start + tl.arange(0, ITEMS)
            total += _sum_of_rows(dh_ptr, order_ptr, item, item >= 0, col, mask_col, N_COLS)
        tl.store(piece_ptr + block * N_COLS + col, total, mask=mask_col)


@triton.jit(do_not_specialize=["n_rows", "skipped_row"])
def _segment_sums_kernel(
    dh_ptr,
    order_ptr,
    start_ptr,
    piece_ptr,
    dtable_ptr,
    n_rows,
    skipped_row,
    N_COLS: tl.constexpr,
    COLS: tl.constexpr,
    ITEMS: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Columns COLS of ROWS rows of the table."""
    n_col_blocks: tl.constexpr = (N_COLS + COLS - 1) // COLS
    first_row = (tl.program_id(0) // n_col_blocks).to(tl.int64) * ROWS
    col = tl.program_id(0) % n_col_blocks * COLS + tl.arange(0, COLS)
    mask_col = col < N_COLS
    end_row = tl.minimum(first_row + ROWS, n_rows)
    if tl.load(start_ptr + first_row) == tl.load(start_ptr + end_row):  # no token at all
        rows = first_row + tl.arange(0, ROWS)[:, None]
        zeros = tl.zeros([ROWS, COLS], dtable_ptr.dtype.element_ty)
        tl.store(dtable_ptr + rows * N_COLS + col[None, :], zeros, mask=(rows < n_rows) & mask_col[None, :])
    else:
        for row in tl.range(first_row, end_row):
            start = tl.load(start_ptr + row)
            end = tl.load(start_ptr + row + 1)
            end = tl.where(row == skipped_row, start, end)
            first_piece = tl.cdiv(start, PIECE)
            end_piece = end // PIECE
            has_pieces = first_piece < end_piece
            # Tokens outside pieces: [start, head_end) and [tail_start, end), counted through.
            head_end = tl.where(has_pieces, first_piece * PIECE, end)
            tail_start = tl.where(has_pieces, end_piece * PIECE, end)
            n_head = head_end - start
            n_loose = n_head + end - tail_start
            total = tl.zeros([COLS], tl.float32)
            for done in tl.range(0, n_loose, ITEMS):
                loose = done + tl.arange(0, ITEMS)
                item = tl.where(loose < n_head, start, tail_start - n_head) + loose
                total += _sum_of_rows(dh_ptr, order_ptr, item, loose < n_loose, col, mask_col, N_COLS)
            for done in tl.range(first_piece, end_piece, ITEMS):
                piece = (done + tl.arange(0, ITEMS)).to(tl.int64)[:, None]
                mask = (piece < end_piece) & mask_col[None, :]
                total += tl.sum(tl.load(piece_ptr + piece * N_COLS + col[None, :], mask=mask, other=0.0), 0)
            tl.store(dtable_ptr + row * N_COLS + col, total.to(dtable_ptr.dtype.element_ty), mask=mask_col)


def key_dtype(num_rows: int) -> torch.dtype:
    """The narrowest dtype that holds the keys 0 to num_rows (num_rows: a token without a row)."""
    return torch.int16 if num_rows < 2**15 else torch.int32


def _block_cols(hidden_size: int, dtype: torch.dtype) -> int:
    """Columns of a program, one warp wide: at least 128 bits for each of 32 threads, and little padding."""
    narrowest = 32 * 16 // dtype.itemsize
    candidates = [cols for cols in (256, 128) if cols >= narrowest]
    return min(candidates, key=lambda cols: (ceil_div(hidden_size, cols) * cols, -cols))


def table_gradient(dh: Tensor, keys: Tensor, num_rows: int, skipped_row: int | None = None) -> Tensor:
    """dtable (Tensor [num_rows, H], dtype of dh): the sum of dh over the tokens of each key.

    dh (Tensor [T, H], fp32/fp16/bf16, contiguous, T >= 1); keys (Tensor [T], dtype `key_dtype(num_rows)`): tokens whose
    key is not in [0, num_rows) count nowhere. skipped_row: a row that stays 0; None for none.
    No device sync, no shape that depends on data.
    """
    num_tokens, hidden_size = dh.shape
    keys, order = torch.sort(keys, stable=True)
    starts = dh.new_empty(num_rows + 1, dtype=torch.int32)
    num_pieces = num_tokens // PIECE
    pieces = dh.new_empty((num_pieces, hidden_size), dtype=torch.float32)
    dtable = dh.new_empty((num_rows, hidden_size))
    cols = _block_cols(hidden_size, dh.dtype)
    col_blocks = ceil_div(hidden_size, cols)
    rows = 1 if num_rows <= _SMALL_TABLE else _ROWS_OF_LARGE_TABLE
    skipped = -1 if skipped_row is None else skipped_row
    constants = {"N_COLS": hidden_size, "COLS": cols, "ITEMS": _ITEMS, "PIECE": PIECE}
    options = {"num_warps": 1, "enable_fp_fusion": True}  # nothing but sums: no effect
    launch_plan(
        _segment_starts_kernel,
        BLOCK=_STARTS_BLOCK,
        num_warps=_STARTS_BLOCK // 32,
        enable_fp_fusion=True,
    )((ceil_div(num_rows + 1, _STARTS_BLOCK),), (keys, starts), (num_tokens, num_rows, num_tokens.bit_length()))
    if num_pieces:
        launch_plan(
            _segment_pieces_kernel,
            **constants,
            **options,
        )((num_pieces * col_blocks,), (dh, keys, order, pieces), (num_rows, skipped))
    launch_plan(
        _segment_sums_kernel,
        ROWS=rows,
        **constants,
        **options,
    )((ceil_div(num_rows, rows) * col_blocks,), (dh, order, starts, pieces, dtable), (num_rows, skipped))
    return dtable
