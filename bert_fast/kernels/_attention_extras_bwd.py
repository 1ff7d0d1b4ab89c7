"""Gradients of attention's bias and distance table. Every program owns a part of its result; no atomics.

    dbias = dS                    dE[r] = sum of dS q over distance r (+ dS k with the key term)

dbias is summed over what the bias is broadcast along. P and dS are made again from q, k, v and lse, tile by tile, once
more for each of the two gradients: they are rare, and nothing of size [B, A, Sq, Sk] need be kept for them. Where
programs would be few (a bias for all rows of the batch, a table), sequences are dealt out to several, which leave
partial sums in fp32 for a second stage.

A bias is looked up by positions, so its gradient is made in the order of positions: a tile's rows and columns are
neighbouring positions, `_ordinals_at` finds the tokens, and positions without one hold nothing. Along a broadcast
dimension tokens are taken as they come.

Precision: sums in fp32, rounded once. Determinism: the order of additions depends on the shapes and the number of
multiprocessors alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.kernels._attention import (
    LOG2E,
    VARYING,
    Bias,
    Drop,
    Extras,
    Table,
    bias_at,
    load_lse,
    load_names,
    load_positions,
    load_rows,
    mask_scores,
    sequence_span,
)
from bert_fast.kernels._attention_bwd import probabilities_and_gradients
from bert_fast.kernels._attention_relative import WIDTH_OF_FP32, relative_scores, relative_table_gradient
from bert_fast.kernels._attention_tiles import Tile, kernel_by_names
from bert_fast.kernels._launch import ceil_div, num_multiprocessors
from bert_fast.kernels._math import philox4x32, split_seed

__all__ = ["extras_gradients"]

_PROGRAMS_PER_MULTIPROCESSOR = 4  # what sequences are dealt out for: two at once, two rounds
_SEQUENCES = 128  # a batch's, usually
_WIDTH = (64, 32)  # rows of the table's gradient to a program, for heads of up to 64 columns and wider ones
_BLOCKS_PER_HEAD = tl.constexpr(65536 // 8)  # Philox blocks of one head: reference/dropout.py, HEAD_STRIDE


@triton.jit
def _ordinals_at(coords_ptr, positions, num_tokens):
    """Which token of a sequence stands at each position; num_tokens where none does.

    Positions ascend, so the one searched for is bounded by what precedes and what follows it: exactly where there are
    no holes, and then nothing is left to halve.
    """
    has_tokens = num_tokens > 0
    first = tl.load(coords_ptr + 1, mask=has_tokens, other=0)
    last = tl.load(coords_ptr + (num_tokens - 1) * 2 + 1, mask=has_tokens, other=0)
    low = tl.maximum(positions - last + num_tokens - 1, 0)
    high = tl.minimum(positions - first, num_tokens - 1)
    while tl.max(high - low, 0) > 0:
        middle = low + (high - low) // 2
        is_open = low < high
        is_below = tl.load(coords_ptr + middle * 2 + 1, mask=is_open, other=0) < positions
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
    found = tl.load(coords_ptr + low * 2 + 1, mask=low < num_tokens, other=-1)
    return tl.where(found == positions, low, num_tokens)


@triton.jit
def _tokens(coords_ptr, num_tokens, step, first_position, BLOCK: tl.constexpr, BY_POSITION: tl.constexpr):
    """(ordinals, positions) of a tile's side: at the positions from first_position on, or the step-th BLOCK tokens."""
    offs = tl.arange(0, BLOCK)
    if BY_POSITION:
        positions = first_position + offs
        return _ordinals_at(coords_ptr, positions, num_tokens), positions.to(tl.uint32)
    else:
        ordinals = step * BLOCK + offs
        _, positions = load_names(coords_ptr, ordinals, num_tokens)
        return ordinals, positions


@triton.jit
def _num_steps(coords_ptr, num_tokens, first_position, BLOCK: tl.constexpr, BY_POSITION: tl.constexpr):
    """How many tiles a side has: 1 or, where no token stands there, 0 by position."""
    if BY_POSITION:
        ordinals = _ordinals_at(coords_ptr, first_position + tl.arange(0, BLOCK), num_tokens)
        return (tl.min(ordinals, 0) < num_tokens).to(tl.int32)
    else:
        return tl.cdiv(num_tokens, BLOCK)


@triton.jit
def _keep_at(drop, batch_row, position, ordinal_k):
    """`keep_tile` of keys anywhere, ordinal_k [N]: a Philox call an element, of which it takes one of 8 values."""
    block = drop.head * _BLOCKS_PER_HEAD + ordinal_k // 32 * 4 + ordinal_k % 8 // 2
    w0, w1, w2, w3 = philox4x32(
        block.to(tl.uint32)[None, :], position[:, None], batch_row.to(tl.uint32), drop.site.to(tl.uint32), drop.k0,
        drop.k1,
    )  # fmt: skip
    word = (ordinal_k % 32 // 8)[None, :]
    bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return tl.where((ordinal_k % 2 == 0)[None, :], bits << 16, bits) > drop.drop_max.to(tl.uint32)


@triton.jit
def _tile_gradient(
    q, k, v, dout, lse, delta, exists, row, position_q, position_k, ordinal_k, scale_log2, drop, extras,
    D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the bias by a tile of scores, divided by z, fp32 [M, N]; lse and delta as in dq."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if extras.table.ptr is not None:
        scores += relative_scores(q, k, position_q, position_k, extras.table, D, PRECISION)
    scores = mask_scores(scores * scale_log2, exists, position_q, position_k, extras.bias, CAUSAL)
    p = tl.exp2(scores - lse[:, None])
    dw = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    if drop.k0 is not None:
        dw = tl.where(_keep_at(drop, row, position_q, ordinal_k), dw, 0.0)
    return p * (dw - delta[:, None])


@triton.jit(
    do_not_specialize=[*VARYING, "num_sequences", "num_shares", "size_q", "size_k", "num_tiles_q", "num_tiles_k"]
)
def _attention_bwd_bias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dbias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, coords_q_ptr,
    coords_k_ptr, seed_ptr, bias_ptr, table_ptr, q_stride, q_head_stride, k_stride, k_head_stride, v_stride,
    v_head_stride, dout_stride, dout_head_stride, bias_row_stride, bias_head_stride, bias_q_stride, bias_k_stride,
    bias_extent, num_distances, num_tokens, num_heads, num_sequences, num_shares, size_q, size_k, num_tiles_q,
    num_tiles_k, softmax_scale, dropout_scale, inverse_scale, drop_max, site, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, KEY_TERM: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_HEADS: tl.constexpr,
    HAS_QUERIES: tl.constexpr, HAS_KEYS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of the bias: dbias [rows or shares, heads, size_q, size_k].

    HAS_ROWS, HAS_HEADS, HAS_QUERIES, HAS_KEYS: the tensor's dimensions that are not broadcast. With rows, `part` is
    this program's row, whose sequences it looks for, SEQUENCES at once; without, it sums every num_shares-th sequence.
    """
    tile_k = tl.program_id(0) % num_tiles_k
    tile_q = tl.program_id(0) // num_tiles_k % num_tiles_q
    plane = tl.program_id(0) // num_tiles_k // num_tiles_q
    part = plane
    first_head, end_head = 0, num_heads
    if HAS_HEADS:
        part = plane // num_heads
        first_head = plane % num_heads
        end_head = first_head + 1
    k0, k1 = None, None
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_sequence in tl.range(0, num_sequences, SEQUENCES, num_stages=1):
        sequences = first_sequence + tl.arange(0, SEQUENCES)
        in_batch = sequences < num_sequences
        starts = tl.load(cu_seqlens_q_ptr + sequences, mask=in_batch, other=0)
        chosen = tl.load(cu_seqlens_q_ptr + sequences + 1, mask=in_batch, other=0) > starts
        if HAS_ROWS:
            rows = tl.load(coords_q_ptr + starts.to(tl.int64) * 2, mask=chosen, other=-1)
            chosen = chosen & (rows == part)
        else:
            chosen = chosen & (sequences % num_shares == part)
        for _ in tl.range(0, tl.sum(chosen.to(tl.int32), 0), num_stages=1):
            sequence = tl.min(tl.where(chosen, sequences, num_sequences), 0)
            chosen = chosen & (sequences != sequence)
            start_q, num_queries = sequence_span(cu_seqlens_q_ptr, sequence)
            start_k, num_keys = sequence_span(cu_seqlens_k_ptr, sequence)
            names_q = coords_q_ptr + start_q * 2
            names_k = coords_k_ptr + start_k * 2
            row = tl.load(names_q)
            steps_q = _num_steps(names_q, num_queries, tile_q * BLOCK_M, BLOCK_M, HAS_QUERIES)
            steps_k = _num_steps(names_k, num_keys, tile_k * BLOCK_N, BLOCK_N, HAS_KEYS)
            for head in tl.range(first_head, end_head, num_stages=1):
                wide_head = tl.cast(head, tl.int64)
                bias = Bias(bias_ptr, bias_q_stride, bias_k_stride, bias_extent)
                bias = bias_at(bias, bias_row_stride, bias_head_stride, row, wide_head)
                extras = Extras(bias, Table(table_ptr, num_distances, KEY_TERM))
                drop = Drop(k0, k1, site, drop_max, head)
                q_of = q_ptr + start_q * q_stride + wide_head * q_head_stride
                k_of = k_ptr + start_k * k_stride + wide_head * k_head_stride
                v_of = v_ptr + start_k * v_stride + wide_head * v_head_stride
                dout_of = dout_ptr + start_q * dout_stride + wide_head * dout_head_stride
                statistics = wide_head * num_tokens + start_q
                for step_q in tl.range(0, steps_q, num_stages=1):
                    offs_q, position_q = _tokens(names_q, num_queries, step_q, tile_q * BLOCK_M, BLOCK_M, HAS_QUERIES)
                    q = load_rows(q_of, q_stride, offs_q, num_queries, D, BLOCK_D, True)
                    dout = load_rows(dout_of, dout_stride, offs_q, num_queries, D, BLOCK_D, True)
                    lse = load_lse(lse_ptr + statistics, offs_q, num_queries, True)
                    delta = tl.load(delta_ptr + statistics + offs_q, mask=offs_q < num_queries, other=0.0)
                    for step_k in tl.range(0, steps_k, num_stages=1):
                        offs_k, position_k = _tokens(names_k, num_keys, step_k, tile_k * BLOCK_N, BLOCK_N, HAS_KEYS)
                        k = load_rows(k_of, k_stride, offs_k, num_keys, D, BLOCK_D, True)
                        v = load_rows(v_of, v_stride, offs_k, num_keys, D, BLOCK_D, True)
                        exists = (offs_q < num_queries)[:, None] & (offs_k < num_keys)[None, :]
                        acc += _tile_gradient(
                            q, k, v, dout, lse, delta * inverse_scale, exists, row, position_q, position_k, offs_k,
                            softmax_scale * LOG2E, drop, extras, D, CAUSAL, PRECISION,
                        )  # fmt: skip
    acc *= dropout_scale
    if not HAS_QUERIES:
        acc = tl.broadcast_to(tl.sum(acc, 0)[None, :], acc.shape)
    if not HAS_KEYS:
        acc = tl.broadcast_to(tl.sum(acc, 1)[:, None], acc.shape)
    offs_m = tile_q * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_k * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = (plane.to(tl.int64) * size_q + offs_m[:, None]) * size_k + offs_n[None, :]
    mask = (offs_m < size_q)[:, None] & (offs_n < size_k)[None, :]
    tl.store(dbias_ptr + offsets, acc.to(dbias_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=[*VARYING, "num_sequences", "num_shares", "num_windows"])
def _attention_bwd_table_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dtable_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, coords_q_ptr,
    coords_k_ptr, seed_ptr, bias_ptr, table_ptr, q_stride, q_head_stride, k_stride, k_head_stride, v_stride,
    v_head_stride, dout_stride, dout_head_stride, bias_row_stride, bias_head_stride, bias_q_stride, bias_k_stride,
    bias_extent, num_distances, num_tokens, num_heads, num_sequences, num_shares, num_windows, softmax_scale,
    dropout_scale, inverse_scale, drop_max, site, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, KEY_TERM: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """WIDTH neighbouring rows of one share of the table's gradient, fp32 [num_shares, num_distances, D].

    A share is every num_shares-th pair of head and sequence. Of their tiles only those are made that hold some of the
    WIDTH distances.
    """
    window = tl.program_id(0) % num_windows
    share = tl.program_id(0) // num_windows
    first_row = window * WIDTH
    first_distance = first_row - (num_distances - 1) // 2
    scale_log2 = softmax_scale * LOG2E
    k0, k1 = None, None
    if HAS_DROPOUT:
        k0, k1 = split_seed(tl.load(seed_ptr))
    dtable = tl.zeros([WIDTH, BLOCK_D], tl.float32)
    for pair in tl.range(share, num_heads * num_sequences, num_shares, num_stages=1):
        sequence = pair // num_heads
        head = pair % num_heads
        wide_head = tl.cast(head, tl.int64)
        start_q, num_queries = sequence_span(cu_seqlens_q_ptr, sequence)
        start_k, num_keys = sequence_span(cu_seqlens_k_ptr, sequence)
        names_q = coords_q_ptr + start_q * 2
        names_k = coords_k_ptr + start_k * 2
        first_key_position = tl.load(names_k + 1, mask=num_keys > 0, other=0)
        last_key_position = tl.load(names_k + (num_keys - 1) * 2 + 1, mask=num_keys > 0, other=0)
        sequence_row = tl.load(names_q, mask=num_queries > 0, other=0)
        bias = Bias(bias_ptr, bias_q_stride, bias_k_stride, bias_extent)
        if bias_ptr is not None:
            bias = bias_at(bias, bias_row_stride, bias_head_stride, sequence_row, wide_head)
        extras = Extras(bias, Table(table_ptr, num_distances, KEY_TERM))
        drop = Drop(k0, k1, site, drop_max, head)
        q_of = q_ptr + start_q * q_stride + wide_head * q_head_stride
        k_of = k_ptr + start_k * k_stride + wide_head * k_head_stride
        v_of = v_ptr + start_k * v_stride + wide_head * v_head_stride
        dout_of = dout_ptr + start_q * dout_stride + wide_head * dout_head_stride
        statistics = wide_head * num_tokens + start_q
        for first_query in tl.range(0, num_queries, BLOCK_M, num_stages=1):
            offs_m = first_query + tl.arange(0, BLOCK_M)
            batch_row, position_q = load_names(names_q, offs_m, num_queries)
            q = load_rows(q_of, q_stride, offs_m, num_queries, D, BLOCK_D, True)
            dout = load_rows(dout_of, dout_stride, offs_m, num_queries, D, BLOCK_D, True)
            lse = load_lse(lse_ptr + statistics, offs_m, num_queries, True)
            delta = tl.load(delta_ptr + statistics + offs_m, mask=offs_m < num_queries, other=0.0) * inverse_scale
            # Keys at these distances stand between two positions: which tokens, as in `_attention.visible_keys`.
            nearest = tl.load(names_q + first_query * 2 + 1) - first_distance - (WIDTH - 1)
            farthest = tl.max(position_q.to(tl.int32), 0) - first_distance
            begin = tl.maximum(nearest - last_key_position + num_keys - 1, 0) // BLOCK_N * BLOCK_N
            end = tl.minimum(farthest - first_key_position + 1, num_keys)
            for first_key in tl.range(begin, end, BLOCK_N, num_stages=1):
                offs_n = first_key + tl.arange(0, BLOCK_N)
                position_k = load_positions(names_k, offs_n, num_keys)
                k = load_rows(k_of, k_stride, offs_n, num_keys, D, BLOCK_D, True)
                v = load_rows(v_of, v_stride, offs_n, num_keys, D, BLOCK_D, True)
                exists = (offs_m < num_queries)[:, None] & (offs_n < num_keys)[None, :]
                _, ds = probabilities_and_gradients(
                    q, k, v, dout, lse, delta, exists, first_key, scale_log2, batch_row, position_q, position_k, drop,
                    extras, D, CAUSAL, False, PRECISION,
                )  # fmt: skip
                dtable = relative_table_gradient(
                    dtable, ds, q, k, position_q, position_k, first_distance, KEY_TERM, PRECISION
                )
    rows = first_row + tl.arange(0, WIDTH)
    cols = tl.arange(0, BLOCK_D)
    offsets = (share.to(tl.int64) * num_distances + rows[:, None]) * D + cols[None, :]
    mask = (rows < num_distances)[:, None] & (cols < D)[None, :]
    tl.store(dtable_ptr + offsets, dtable * (softmax_scale * dropout_scale), mask=mask)


def _num_shares(num_programs: int, most: int, device: torch.device) -> int:
    """How many programs share what one could do, where `num_programs` would be there without sharing."""
    wanted = num_multiprocessors(device) * _PROGRAMS_PER_MULTIPROCESSOR
    return max(1, min(most, wanted // num_programs))


def _bias_gradient(arguments: dict[str, Any], bias: Tensor, tile: Tile, num_sequences: int) -> Tensor:
    """The gradient of the bias."""
    has_rows, has_heads, has_queries, has_keys = (size > 1 for size in bias.shape)
    num_tiles_q, num_tiles_k = ceil_div(bias.shape[2], tile.block_m), ceil_div(bias.shape[3], tile.block_n)
    num_programs = num_tiles_q * num_tiles_k * bias.shape[1]
    num_shares = 1 if has_rows else _num_shares(num_programs, num_sequences, bias.device)
    dtype = bias.dtype if num_shares == 1 else torch.float32
    dbias = torch.empty((bias.shape[0] * num_shares, *bias.shape[1:]), dtype=dtype, device=bias.device)
    arguments = arguments | {
        "dbias_ptr": dbias, "num_sequences": num_sequences, "num_shares": num_shares, "size_q": bias.shape[2],
        "size_k": bias.shape[3], "num_tiles_q": num_tiles_q, "num_tiles_k": num_tiles_k,
        "HAS_ROWS": has_rows, "HAS_HEADS": has_heads, "HAS_QUERIES": has_queries, "HAS_KEYS": has_keys,
        "SEQUENCES": _SEQUENCES,
    }  # fmt: skip
    kernel_by_names(_attention_bwd_bias_kernel, tile)((num_programs * dbias.shape[0],), arguments)
    return dbias if num_shares == 1 else dbias.sum(0, keepdim=True).to(bias.dtype)


def _table_gradient(arguments: dict[str, Any], distance_table: Tensor, tile: Tile, num_sequences: int) -> Tensor:
    """The gradient of the table of relative positions."""
    width = WIDTH_OF_FP32 if arguments["table_ptr"].dtype == torch.float32 else _WIDTH[arguments["BLOCK_D"] > 64]
    num_windows = ceil_div(len(distance_table), width)
    num_shares = _num_shares(num_windows, arguments["num_heads"] * num_sequences, distance_table.device)
    partial = torch.empty((num_shares, *distance_table.shape), dtype=torch.float32, device=distance_table.device)
    arguments = arguments | {
        "dtable_ptr": partial, "num_sequences": num_sequences, "num_shares": num_shares, "num_windows": num_windows,
        "WIDTH": width,
    }  # fmt: skip
    kernel_by_names(_attention_bwd_table_kernel, tile)((num_windows * num_shares,), arguments)
    return partial.sum(0).to(distance_table.dtype)


def extras_gradients(
    arguments: dict[str, Any], tile: Tile, num_sequences: int, extras: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of bias and distance_table, each in its tensor's shape and dtype, contiguous.

    arguments: of the tiled backward kernels, by name. tile: of the launch. extras: those of the two whose gradients
    are wanted, by name.
    """
    made = {"bias": _bias_gradient, "distance_table": _table_gradient}
    return {name: made[name](arguments, x, tile, num_sequences) for name, x in extras.items()}
