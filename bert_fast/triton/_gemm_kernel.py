"""c = epilogue(a @ b): one persistent kernel for all matrix products, and the second stage of products split along K.

a [M, K] and b [K, N] lie in memory as they are ("row") or transposed. fp32 accumulators; what follows a product is
`finish`, below. docs/kernels/linear.md explains the design.

Work: the output is cut into tiles [BLOCK_M, BLOCK_N]; a program takes every num_programs-th. Tiles are numbered in
groups of GROUP_M rows of tiles, column by column within a group, so that tiles made at the same time share operands:
about GROUP_M row blocks of a and as many column blocks of b as there are tiles at work, divided by GROUP_M, are read
from cache rather than from memory.

Bytes moved, of e-byte operands and E-byte results:
    operands     (M K ceil(N / BLOCK_N) + K N ceil(M / BLOCK_M)) e from cache, (M K + K N) e from memory
    results      M N E for y; M N e more for z (written) and for x (read), where there is one
    column sums  4 N ceil(M / BLOCK_M), read again by the second stage
    split        4 M N S written, and read again by the second stage

Determinism: no atomics. Every element is summed in the order of K by one program, or by S programs whose sums are added
in order.

Order of tiles: Tillet et al. 2019 (doi:10.1145/3315508.3329973), as in Triton's tutorials; split-K and its two-stage
form: NVIDIA CUTLASS' documentation on efficient matrix products.

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

from bert_fast.triton._activations import activation, activation_derivative


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


@triton.jit
def _tile_position(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """(row block, column block) of a tile in grouped order."""
    per_group = GROUP_M * num_n
    first_m = tile // per_group * GROUP_M
    rows = tl.minimum(num_m - first_m, GROUP_M)
    within = tile % per_group
    return first_m + within % rows, within // rows


@triton.jit
def _load_a(a, m, k, stride, n_rows, n_k, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
            TMA: tl.constexpr):  # fmt: skip
    """[BLOCK_M, BLOCK_K] of a at (m, k); the transpose is a matter of how the product reads shared memory."""
    if TRANSPOSED:
        return load_tile(a, k, m, stride, n_k, n_rows, BLOCK_K, BLOCK_M, TMA).T
    else:
        return load_tile(a, m, k, stride, n_rows, n_k, BLOCK_M, BLOCK_K, TMA)


@triton.jit
def _load_b(b, k, n, stride, n_k, n_cols, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
            TMA: tl.constexpr):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of b at (k, n)."""
    if TRANSPOSED:
        return load_tile(b, n, k, stride, n_cols, n_k, BLOCK_N, BLOCK_K, TMA).T
    else:
        return load_tile(b, k, n, stride, n_k, n_cols, BLOCK_K, BLOCK_N, TMA)


@triton.jit
def _descriptor(ptr, stride, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A tensor descriptor, in global memory, of a matrix [n_rows, n_cols] that lies as it is or transposed."""
    if TRANSPOSED:
        return tl.make_tensor_descriptor(ptr, [n_cols, n_rows], [stride, 1], [COLS, ROWS])
    else:
        return tl.make_tensor_descriptor(ptr, [n_rows, n_cols], [stride, 1], [ROWS, COLS])


@triton.jit
def _halves(tile):
    """The left and the right half of a tile [M, N]: [M, 2, N / 2] -> [M, N / 2, 2] -> two of [M, N / 2]."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _column_parts(tile, PARTS: tl.constexpr):
    """A tile [M, N] as PARTS (1, 2 or 4) tiles of neighbouring columns, from left to right."""
    if PARTS == 1:
        return (tile,)
    elif PARTS == 2:
        return _halves(tile)
    else:
        tl.static_assert(PARTS == 4)
        left, right = _halves(tile)
        return _halves(left) + _halves(right)


@triton.jit(do_not_specialize=["m_units", "n_units", "k_units", "num_splits"])
def _gemm_kernel(
    a,
    b,
    bias_ptr,
    x,
    y,
    z,
    partial_ptr,
    a_stride,
    b_stride,
    x_stride,
    y_stride,
    z_stride,
    m_units,
    n_units,
    k_units,
    num_splits,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    TMA: tl.constexpr,
    TMA_RESULTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    M_UNIT: tl.constexpr,
    N_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Every num_programs-th tile of y = epilogue(a @ b).

    Sizes count UNITs of elements, so that Triton sees masks change at whole vectors only. IS_SPLIT: the sum over K is
    cut into num_splits; y (fp32 [num_splits * row blocks * BLOCK_M, N]) takes the partial products. PARTS: the columns
    of the accumulator are finished so many at a time, so that an epilogue holds less in registers and shared memory.
    """
    n_rows, n_cols, n_k = m_units * M_UNIT, n_units * N_UNIT, k_units * K_UNIT
    num_m, num_n, num_k = tl.cdiv(n_rows, BLOCK_M), tl.cdiv(n_cols, BLOCK_N), tl.cdiv(n_k, BLOCK_K)
    num_tiles = num_m * num_n * num_splits
    if WARP_SPECIALIZE:
        # The compiler shares a tile out to two groups of warps, and cuts the tiles of descriptors that it made itself.
        a = _descriptor(a, a_stride, n_rows, n_k, BLOCK_M, BLOCK_K, A_TRANSPOSED)
        b = _descriptor(b, b_stride, n_k, n_cols, BLOCK_K, BLOCK_N, B_TRANSPOSED)
        if TMA_RESULTS:
            y = _descriptor(y, y_stride, n_rows, n_cols, BLOCK_M, BLOCK_N // PARTS, False)
            if x is not None:
                x = _descriptor(x, x_stride, n_rows, n_cols, BLOCK_M, BLOCK_N // PARTS, False)
            if z is not None:
                z = _descriptor(z, z_stride, n_rows, n_cols, BLOCK_M, BLOCK_N // PARTS, False)
    k_per_split = tl.cdiv(num_k, num_splits)
    if EVEN_K:
        k_bound: tl.constexpr = None  # whole blocks: no tile reaches past the end
    else:
        k_bound = n_k
    # One loop for all steps of all tiles lets the copy engine load the next tile's operands while this one is finished.
    # Without one, addresses of results would take up registers in a common loop, and if they were computed ahead of it.
    is_flat: tl.constexpr = TMA and not WARP_SPECIALIZE
    for tile in tl.range(
        tl.program_id(0), num_tiles, tl.num_programs(0), flatten=is_flat, warp_specialize=WARP_SPECIALIZE,
        disable_licm=not TMA,
    ):  # fmt: skip
        first_k = 0
        last_k = num_k
        of_split = tile
        first_row = 0  # of this split's partial products
        result_rows = n_rows
        if IS_SPLIT:
            split = tile // (num_m * num_n)
            of_split = tile - split * num_m * num_n
            first_k = split * k_per_split
            last_k = tl.minimum(first_k + k_per_split, num_k)
            first_row = split * num_m * BLOCK_M
            result_rows = num_splits * num_m * BLOCK_M
        m_block, n_block = _tile_position(of_split, num_m, num_n, GROUP_M)
        m, n = m_block * BLOCK_M, n_block * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k_block in tl.range(first_k, last_k):
            k = k_block * BLOCK_K
            a_tile = _load_a(a, m, k, a_stride, n_rows, k_bound, BLOCK_M, BLOCK_K, A_TRANSPOSED, TMA)
            b_tile = _load_b(b, k, n, b_stride, k_bound, n_cols, BLOCK_K, BLOCK_N, B_TRANSPOSED, TMA)
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        columns = _column_parts(acc, PARTS)
        for part in tl.static_range(PARTS):
            finish(
                columns[part], bias_ptr, x, y, z, partial_ptr, first_row + m, m_block, n + part * (BLOCK_N // PARTS),
                x_stride, y_stride, z_stride, result_rows, n_cols, KIND, ACTIVATION, TMA_RESULTS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "n_units", "num_splits", "split_rows"])
def _gemm_reduce_kernel(
    product_ptr,
    bias_ptr,
    x_ptr,
    y_ptr,
    z_ptr,
    partial_ptr,
    x_stride,
    y_stride,
    z_stride,
    n_rows,
    n_units,
    num_splits,
    split_rows,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    N_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Second stage of a split product: adds partial products (fp32 [num_splits, split_rows, N]), then the epilogue.

    Program (i, j): the tile [BLOCK_M, BLOCK_N] at row block i, column block j.
    """
    n_cols = n_units * N_UNIT
    m_block = tl.program_id(0)
    m, n = m_block * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    split_size = split_rows.to(tl.int64) * n_cols  # split_rows: row blocks of the first stage, whole ones
    for split in tl.range(0, num_splits):
        acc += load_tile(product_ptr + split * split_size, m, n, n_cols, n_rows, n_cols, BLOCK_M, BLOCK_N, False)
    finish(
        acc, bias_ptr, x_ptr, y_ptr, z_ptr, partial_ptr, m, m_block, n, x_stride, y_stride, z_stride, n_rows, n_cols,
        KIND, ACTIVATION, False,
    )  # fmt: skip
