"""SPLADE's vectors in Triton: products whose epilogue takes maxima over texts, gradients of scores made on the fly.

    forward   a program owns BLOCK_N words of a group of neighbouring texts, whose tokens it treats BLOCK_M at a time,
              wherever texts begin and end: scores = x W^T + b in registers, then for each text in the tile its maximum
              so far and the first token that has it. What a text's last tile leaves is stored: y = f(maximum), token
    dx        a program owns BLOCK_M tokens of one text and BLOCK_H columns; for BLOCK_N words at a time it makes the
              tile of dZ: g of the word where its token is the row, else 0; acc += dZ W
    dweight   a program owns BLOCK_N words and BLOCK_H columns; each text adds g * x[token], one row for each word: as
    dbias     many terms as there are texts, where a product with dZ^T would have as many as there are tokens

A group holds the texts that begin within _GROUP_TOKENS tokens, so every text is of one group, and no maximum is put
together from those of several programs. Programs of one block of words stand side by side, so that W is read from
memory once while x, the smaller one, stays in the cache. In dx the programs of text b are numbered from
cu_seqlens[b] // BLOCK_M + b on: that leaves each text enough of them, and both kernels find texts by bisection.

A score above 0 is compared by its bits: those of positive floats are in the order of their values, and NaN's are above
all; what is not above 0 counts as 0. So NaN wins, as in PyTorch, and ties go to the first token.

Shapes: x, dx [T, H]; weight, dweight [V, H]; bias, dbias [V]; cu_seqlens [B + 1]; y, dy, tokens [B, V].
Bytes moved, elements of x of e bytes:
    forward   T H e V / BLOCK_N from the cache, V H e T / _GROUP_TOKENS from cache or memory, 8 B V written
    dx        per block of tokens: V H e and 12 V H / BLOCK_H read, BLOCK_M H e written
    dweight   per text with a gradient at a word: H e read; 12 B V H / BLOCK_H, V H written
Precision: sums, maxima and logarithms in fp32; g is rounded to the dtype of x in dx, not in dweight and dbias.
Determinism: no atomics; sums are taken in the order of words and of texts. No device sync.
"""

from collections.abc import Set
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.reference.splade import Splade
from bert_fast.triton._cross_entropy_rows import _exp_of
from bert_fast.triton._gemm import _precision, narrowed
from bert_fast.triton._launch import architecture, ceil_div, kind_of, unit_stride
from bert_fast.triton._launch_plan import launch_plan

_GROUP_TOKENS = 256  # four tiles: a tile at a group's end is a third full on average, and W is read T / 256 times
_NAN = tl.constexpr(0x7FC00000)
_BEHIND = tl.constexpr(2**31 - 1)  # greater than every token


class Tile(NamedTuple):
    """What programs own, and the step along the sum."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# 64 rows are what four warps of sm_90 multiply at once; three steps of 128 bytes along the sum, 73 KB, fit everywhere.
# fp32 is multiplied as three terms, whose registers eight warps share.
_WIDE, _NARROW = Tile(64, 128, 64, 4, 3), Tile(64, 64, 64, 4, 3)
_NARROW_FP32 = Tile(64, 64, 32, 8, 3)
_DWEIGHT = Tile(0, 16, 256, 4, 1)  # 16 rows of x in flight, 512 bytes of each in half precision; block_k: columns


def forward_tile(dtype: torch.dtype, architecture: str) -> Tile:
    """Of scores: as wide as maxima leave registers for. On sm_100 a thread has whole rows."""
    if kind_of(architecture) == "sm_100":
        return _NARROW_FP32._replace(num_warps=4) if dtype == torch.float32 else _NARROW
    return _NARROW_FP32 if dtype == torch.float32 else _WIDE


def dx_tile(dtype: torch.dtype) -> Tile:
    """Of dx; block_n: columns, block_k: words."""
    return _NARROW_FP32 if dtype == torch.float32 else _WIDE


@triton.jit
def _first_at(cu_seqlens_ptr, n_texts, token, BLOCK: tl.constexpr):
    """The first text b for which cu_seqlens[b] // BLOCK + b >= token, n_texts where there is none; BLOCK 0: by offset.

    Found by bisection.
    """
    low = 0
    high = n_texts
    while low < high:
        middle = (low + high) // 2
        key = tl.load(cu_seqlens_ptr + middle)
        if BLOCK > 0:
            key = key // BLOCK + middle
        low = tl.where(key < token, middle + 1, low)
        high = tl.where(key < token, high, middle)
    return low


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0, also where 1 + x is rounded to 1: near 0 the series of 2 artanh(x / (2 + x))."""
    s = x / (2.0 + x)
    s2 = s * s
    series = 2.0 * s * (1.0 + s2 * (1.0 / 3 + s2 * (1.0 / 5 + s2 * (1.0 / 7 + s2 * (1.0 / 9)))))
    return tl.where(x < 0.5, series, tl.log(1.0 + x))


@triton.jit
def _gradient(dy_ptr, y_ptr, tokens_ptr, offset, mask, TWICE: tl.constexpr):
    """(g, token): of (text, word) pairs at these offsets; 0 and -1 where there is no gradient, and outside of mask."""
    token = tl.load(tokens_ptr + offset, mask=mask, other=-1)
    has_gradient = token >= 0
    y = tl.load(y_ptr + offset, mask=has_gradient, other=0.0)
    dy = tl.load(dy_ptr + offset, mask=has_gradient, other=0.0)
    power = -y
    if TWICE:
        power -= _exp_of(y) - 1.0
    return tl.where(has_gradient, dy * _exp_of(power), 0.0), token


@triton.jit(do_not_specialize=["n_texts", "n_groups", "n_words"])
def _splade_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    cu_seqlens_ptr,
    y_ptr,
    tokens_ptr,
    x_stride,
    weight_stride,
    n_texts,
    n_groups,
    n_words,
    n_columns,
    GROUP: tl.constexpr,
    TWICE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block of words, group of texts), groups side by side; tokens_ptr may be None."""
    group = tl.program_id(0) % n_groups
    offs_n = tl.program_id(0) // n_groups * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < n_words
    text = _first_at(cu_seqlens_ptr, n_texts, group * GROUP, 0)
    last_text = _first_at(cu_seqlens_ptr, n_texts, (group + 1) * GROUP, 0)
    start = tl.load(cu_seqlens_ptr + text)
    stop = tl.load(cu_seqlens_ptr + last_text)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + offs_n.to(tl.int64)[None, :] * weight_stride + offs_k[:, None]  # [BLOCK_K, BLOCK_N]
    for m in tl.range(start, stop, BLOCK_M):
        # 1. Scores of BLOCK_M tokens, [BLOCK_M, BLOCK_N].
        rows = m + tl.arange(0, BLOCK_M)
        mask_m = rows < stop
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + offs_k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, n_columns, BLOCK_K):
            mask_k = offs_k < n_columns - k
            x = tl.load(x_ptrs + k, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            w = tl.load(weight_ptrs + k, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        acc += bias[None, :]
        # 2. Bits that are in the order of the scores, 0 where those are not above 0.
        bits = tl.where(acc > 0.0, acc, 0.0).to(tl.int32, bitcast=True)
        bits = tl.where(acc != acc, _NAN, bits)
        # 3. The texts of the tile.
        end_of_tile = tl.minimum(m + BLOCK_M, stop)
        at = m
        while at < end_of_tile:
            end = tl.load(cu_seqlens_ptr + text + 1)
            is_of_text = ((rows >= at) & (rows < tl.minimum(end, end_of_tile)))[:, None]
            here = tl.where(is_of_text, bits, 0)
            top_here = tl.max(here, 0)
            first = tl.min(tl.where(is_of_text & (here == top_here[None, :]), rows[:, None], _BEHIND), 0)
            # 4. Beside what the tiles before left of the text: in memory, where a thread has a word or two of it, not
            # in registers, where the layout of products would give each thread a quarter of them.
            offset = text.to(tl.int64) * n_words + offs_n
            mask_before = offs_n < tl.where(tl.load(cu_seqlens_ptr + text) < m, n_words, 0)
            before = tl.load(y_ptr + offset, mask=mask_before, other=0.0).to(tl.int32, bitcast=True)
            if tokens_ptr is not None:
                token = tl.load(tokens_ptr + offset, mask=mask_before, other=-1)
                tl.store(tokens_ptr + offset, tl.where(top_here > before, first, token), mask=mask_n)
            top = tl.maximum(top_here, before).to(tl.float32, bitcast=True)
            # 5. A text that ends here is done.
            y = _log1p(top)
            if TWICE:
                y = _log1p(y)
            tl.store(y_ptr + offset, tl.where(end <= end_of_tile, y, top), mask=mask_n)
            tl.debug_barrier()  # the next tile may read it in other threads
            text += tl.where(end <= end_of_tile, 1, 0)
            at = tl.minimum(end, end_of_tile)
    # 6. Texts without tokens behind the last tile.
    while text < last_text:
        offset = text.to(tl.int64) * n_words + offs_n
        tl.store(y_ptr + offset, tl.zeros([BLOCK_N], tl.float32), mask=mask_n)
        if tokens_ptr is not None:
            tl.store(tokens_ptr + offset, tl.full([BLOCK_N], -1, tl.int32), mask=mask_n)
        text += 1


@triton.jit(do_not_specialize=["n_texts", "n_words"])
def _splade_bwd_dx_kernel(
    dy_ptr,
    y_ptr,
    tokens_ptr,
    weight_ptr,
    cu_seqlens_ptr,
    dx_ptr,
    weight_stride,
    n_texts,
    n_words,
    n_columns,
    TWICE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, j): the i-th block of tokens, if there is one, and BLOCK_H columns of dx."""
    block = tl.program_id(0)
    text = _first_at(cu_seqlens_ptr, n_texts, block + 1, BLOCK_M) - 1
    start = tl.load(cu_seqlens_ptr + text)
    end = tl.load(cu_seqlens_ptr + text + 1)
    first = start + (block - start // BLOCK_M - text) * BLOCK_M
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        offs_n = tl.arange(0, BLOCK_N)
        weight_ptrs = weight_ptr + offs_n.to(tl.int64)[:, None] * weight_stride + offs_h[None, :]
        pairs = text.to(tl.int64) * n_words
        acc = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        for n in tl.range(0, n_words, BLOCK_N):
            mask_n = offs_n < n_words - n
            g, token = _gradient(dy_ptr, y_ptr, tokens_ptr, pairs + n + offs_n, mask_n, TWICE)
            dscores = tl.where(token[None, :] == rows[:, None], g[None, :], 0.0)  # [BLOCK_M, BLOCK_N]
            mask_w = mask_n[:, None] & (offs_h < n_columns)[None, :]
            w = tl.load(weight_ptrs + tl.cast(n, tl.int64) * weight_stride, mask=mask_w, other=0.0)
            acc = tl.dot(dscores.to(w.dtype), w, acc, input_precision=PRECISION)
        offset = rows.to(tl.int64)[:, None] * n_columns + offs_h[None, :]
        mask = (rows < end)[:, None] & (offs_h < n_columns)[None, :]
        tl.store(dx_ptr + offset, acc.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_texts", "n_words"])
def _splade_bwd_dweight_kernel(
    dy_ptr,
    y_ptr,
    tokens_ptr,
    x_ptr,
    dweight_ptr,
    dbias_ptr,
    x_stride,
    n_texts,
    n_words,
    n_columns,
    TWICE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (i, j): BLOCK_N words, BLOCK_H columns of dweight; those of j = 0 make dbias. Either may be None."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < n_words
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < n_columns
    acc = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    for text in tl.range(0, n_texts):
        offset = tl.cast(text, tl.int64) * n_words + offs_n
        g, token = _gradient(dy_ptr, y_ptr, tokens_ptr, offset, mask_n, TWICE)
        total += g
        if dweight_ptr is not None:
            x_offset = token.to(tl.int64)[:, None] * x_stride + offs_h[None, :]
            mask_x = (g != 0.0)[:, None] & mask_h[None, :]
            acc += g[:, None] * tl.load(x_ptr + x_offset, mask=mask_x, other=0.0).to(tl.float32)
    if dweight_ptr is not None:
        offset = offs_n.to(tl.int64)[:, None] * n_columns + offs_h[None, :]
        tl.store(dweight_ptr + offset, acc.to(dweight_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_h[None, :])
    if dbias_ptr is not None:
        mask_b = offs_n < tl.where(tl.program_id(1) == 0, n_words, 0)
        tl.store(dbias_ptr + offs_n, total.to(dbias_ptr.dtype.element_ty), mask=mask_b)


def splade_fwd(a: Splade) -> tuple[Tensor, Tensor | None]:
    """(y, tokens or None), as `reference.splade`."""
    x, weight = unit_stride(a.x), unit_stride(narrowed(a.weight, a.x))
    (num_tokens, num_columns), num_words = x.shape, len(weight)
    y = torch.empty(a.num_texts, num_words, dtype=torch.float32, device=x.device)
    tokens = torch.empty_like(y, dtype=torch.int32) if a.wants_tokens else None
    if not a.num_texts:
        return y, tokens
    name, groups = architecture(x.device), num_tokens // _GROUP_TOKENS + 1
    tile = forward_tile(x.dtype, name)
    launch_plan(
        _splade_fwd_kernel,
        GROUP=_GROUP_TOKENS,
        TWICE=a.activation == "log1p_relu",
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PRECISION=_precision(x.dtype, name),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,  # Horner's rule in logarithms
    )(
        (groups * ceil_div(num_words, tile.block_n),),
        (x, weight, None if a.bias is None else a.bias.contiguous(), a.cu_seqlens.contiguous(), y, tokens),
        (x.stride(0), weight.stride(0), a.num_texts, groups, num_words, num_columns),
    )
    return y, tokens


def splade_bwd(a: Splade, dy: Tensor, y: Tensor, tokens: Tensor, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, as `reference.splade`."""
    made: dict[str, Tensor] = {}
    dy, y, tokens = dy.contiguous(), y.contiguous(), tokens.contiguous()
    (num_tokens, num_columns), (num_texts, num_words) = a.x.shape, y.shape
    twice = a.activation == "log1p_relu"
    if "x" in wants:
        made["x"] = a.x.new_empty((num_tokens, num_columns))
    if "weight" in wants:
        made["weight"] = a.weight.new_empty((num_words, num_columns))
    if "bias" in wants:
        made["bias"] = a.weight.new_empty(num_words)
    if "x" in made and made["x"].numel():
        weight, tile = unit_stride(narrowed(a.weight, a.x)), dx_tile(a.x.dtype)
        launch_plan(
            _splade_bwd_dx_kernel,
            TWICE=twice,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_k,
            BLOCK_H=tile.block_n,
            PRECISION=_precision(a.x.dtype, architecture(a.x.device)),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )(
            (num_tokens // tile.block_m + num_texts, ceil_div(num_columns, tile.block_n)),
            (dy, y, tokens, weight, a.cu_seqlens.contiguous(), made["x"]),
            (weight.stride(0), num_texts, num_words, num_columns),
        )
    if "weight" in made or "bias" in made:
        x, tile = unit_stride(a.x), _DWEIGHT
        columns = num_columns if "weight" in made else 1
        launch_plan(
            _splade_bwd_dweight_kernel,
            TWICE=twice,
            BLOCK_N=tile.block_n,
            BLOCK_H=tile.block_k,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )(
            (ceil_div(num_words, tile.block_n), max(1, ceil_div(columns, tile.block_k))),
            (dy, y, tokens, x, made.get("weight"), made.get("bias")),
            (x.stride(0), num_texts, num_words, num_columns),
        )
    return made
