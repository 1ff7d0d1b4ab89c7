"""What the matrix-product kernels share: tiles in and out of memory, and everything that follows a product.

A matrix in memory is row-major: neighbours in a row are neighbours in memory, rows are `stride` elements apart. A
kernel knows it by a tensor descriptor (TMA: the copy engine of sm_90 and later moves whole tiles and knows the matrix'
bounds) or by a pointer; `load_tile` and `store_tile` are the only places that tell the two apart.

`finish` turns an accumulator tile into results. With acc = a @ b (+ bias), fp32:

    KIND            y                             z, where it is not None   x
    "plain"         acc                           -                         -
    "accumulate"    acc + x                       -                         may be y itself
    "activation"    act(acc)                      acc                       -
    "derivative"    acc * act'(x)                 act(x)                    pre-activation
    "recomputed"    x * act'(acc)                 -                         upstream gradient

partial_ptr, where it is not None, takes the column sums of y over the rows of the tile, before y is rounded.
"""

import triton
import triton.language as tl

from bert_fast.kernels._activations import activation, activation_derivative

__all__ = ["finish", "load_tile", "store_tile"]


@triton.jit
def _tile_addresses(x, row, col, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Where the elements of a tile [ROWS, COLS] lie: where its first one does, and what no loop changes."""
    first = x + (tl.cast(row, tl.int64) * stride + col)
    return first + (tl.arange(0, ROWS)[:, None].to(tl.int64) * stride + tl.arange(0, COLS)[None, :])


@triton.jit
def _tile_mask(row, col, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which elements of a tile lie inside a matrix [n_rows, n_cols]; a size of None needs no look."""
    if n_rows is None:
        return tl.arange(0, COLS)[None, :] < n_cols - col
    elif n_cols is None:
        return tl.arange(0, ROWS)[:, None] < n_rows - row
    else:
        return (tl.arange(0, ROWS)[:, None] < n_rows - row) & (tl.arange(0, COLS)[None, :] < n_cols - col)


@triton.jit
def load_tile(x, row, col, stride, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """The tile [ROWS, COLS] at (row, col) of a matrix [n_rows, n_cols]; 0 outside of it.

    One of the sizes may be None: then the tile is known to lie inside along it.
    """
    if TMA:
        return x.load([row, col])
    else:
        mask = _tile_mask(row, col, n_rows, n_cols, ROWS, COLS)
        return tl.load(_tile_addresses(x, row, col, stride, ROWS, COLS), mask=mask, other=0.0)


@triton.jit
def store_tile(x, tile, row, col, stride, n_rows, n_cols, TMA: tl.constexpr):
    """Rounds the tile to the matrix' dtype and stores what of it lies inside the matrix [n_rows, n_cols]."""
    if TMA:
        x.store([row, col], tile.to(x.dtype))
    else:
        mask = _tile_mask(row, col, n_rows, n_cols, tile.shape[0], tile.shape[1])
        addresses = _tile_addresses(x, row, col, stride, tile.shape[0], tile.shape[1])
        tl.store(addresses, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def finish(
    acc,
    bias_ptr,
    x,
    y,
    z,
    partial_ptr,
    row,
    row_block,
    col,
    x_stride,
    y_stride,
    z_stride,
    n_rows,
    n_cols,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Everything between the accumulator tile [ROWS, COLS] at (row, col) and memory; see the module's table.

    row_block: row of partial (fp32 [row blocks, n_cols]) that takes the column sums.
    """
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    if TMA:
        OUT: tl.constexpr = y.dtype
    else:
        OUT: tl.constexpr = y.dtype.element_ty
    offs_n = col + tl.arange(0, COLS)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < n_cols, other=0.0).to(tl.float32)[None, :]
    if KIND == "accumulate":
        acc += load_tile(x, row, col, x_stride, n_rows, n_cols, ROWS, COLS, TMA).to(tl.float32)
    elif KIND == "activation":
        if z is not None:
            store_tile(z, acc, row, col, z_stride, n_rows, n_cols, TMA)
        acc = activation(acc, ACTIVATION, OUT)
    elif KIND == "derivative":
        pre = load_tile(x, row, col, x_stride, n_rows, n_cols, ROWS, COLS, TMA).to(tl.float32)
        if z is not None:
            store_tile(z, activation(pre, ACTIVATION, OUT), row, col, z_stride, n_rows, n_cols, TMA)
        acc *= activation_derivative(pre, ACTIVATION, OUT)
    elif KIND == "recomputed":
        dy = load_tile(x, row, col, x_stride, n_rows, n_cols, ROWS, COLS, TMA).to(tl.float32)
        acc = dy * activation_derivative(acc, ACTIVATION, OUT)
    else:
        tl.static_assert(KIND == "plain")
    if partial_ptr is not None:  # rows past the last add 0: there a and x are 0
        sums_ptr = partial_ptr + tl.cast(row_block, tl.int64) * n_cols
        tl.store(sums_ptr + offs_n, tl.sum(acc, 0), mask=offs_n < n_cols)
    store_tile(y, acc, row, col, y_stride, n_rows, n_cols, TMA)
