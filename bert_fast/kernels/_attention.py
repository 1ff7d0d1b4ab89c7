"""Device helpers of the attention kernels: where tiles lie, which of their scores exist, which probabilities are kept.

Scores live in base 2: with c = softmax_scale * log2(e), exp(softmax_scale * s - lse) is exp2(c * s - log2(e) * lse),
one multiply-add and one instruction of the special function unit.

A tile is *plain* where every score exists and nothing but q and k enters it: no bounds, no causality, no bias. Most
tiles are, and the instructions that the others need would be a third of theirs; so kernels walk plain tiles in a loop
of their own.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bert_fast.kernels._math import philox4x32

__all__ = [
    "LOG2E",
    "VARYING",
    "Bias",
    "Drop",
    "Extras",
    "Keys",
    "Table",
    "bias_at",
    "dropped",
    "gradients_of_scores",
    "keep_tile",
    "load_lse",
    "load_names",
    "load_positions",
    "load_rows",
    "locate",
    "mask_scores",
    "sequence_span",
    "store_rows",
    "visible_keys",
]

LOG2E = tl.constexpr(1.4426950408889634)
# Arguments that change from batch to batch: specialized for, each would compile kernels again. For `do_not_specialize`.
VARYING = [
    "num_tokens", "num_blocks", "drop_max", "site", "bias_row_stride", "bias_head_stride", "bias_q_stride",
    "bias_extent",
]  # fmt: skip
_BLOCKS_PER_HEAD = tl.constexpr(65536 // 8)  # Philox blocks of one head: reference/dropout.py, HEAD_STRIDE


# What helpers are given together: structures of the compiler's, which the machine's code shows nothing of. Arguments of
# kernels stay flat, as Triton specialises each by itself; and structures are made in kernels, since Triton 3.6 makes
# tensors of what functions return, and there is none of None.
class Bias(NamedTuple):
    """A bias at one row of the batch and head; ptr is None where there is none."""

    ptr: Any
    q_stride: Any
    k_stride: Any
    extent: Any  # elements from ptr to the tensor's end: nothing beyond is read


class Table(NamedTuple):
    """The table of relative positions; ptr is None where there is none."""

    ptr: Any
    num_distances: Any
    key_term: Any  # constexpr: keys are multiplied with it too


class Extras(NamedTuple):
    """What enters scores by the positions of queries and keys."""

    bias: Any
    table: Any


class Drop(NamedTuple):
    """What names a dropout mask beside its tokens; k0 is None where nothing is dropped."""

    k0: Any
    k1: Any
    site: Any
    drop_max: Any  # see `_math.keep_values`
    head: Any


class Keys(NamedTuple):
    """One sequence's keys and values, of one head."""

    k_ptr: Any
    v_ptr: Any
    k_stride: Any
    v_stride: Any
    coords_ptr: Any
    num: Any


@triton.jit
def locate(num_blocks, num_heads, order_ptr):
    """Block, head and sequence of this program; blocks of a head follow one another, so they share k and v in L2.

    order_ptr (int32 [B], or None): the n-th sequence to work on.
    """
    program = tl.program_id(0)
    block = program % num_blocks
    head = (program // num_blocks) % num_heads
    sequence = program // num_blocks // num_heads
    if order_ptr is not None:
        sequence = tl.load(order_ptr + sequence)
    return block, head, sequence


@triton.jit
def sequence_span(cu_seqlens_ptr, sequence):
    """First token (int64: offsets pass 2^31) and number of tokens (int32) of a sequence."""
    start = tl.load(cu_seqlens_ptr + sequence)
    return start.to(tl.int64), tl.load(cu_seqlens_ptr + sequence + 1) - start


@triton.jit
def load_rows(ptr, row_stride, rows, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECKED: tl.constexpr):
    """Tile [len(rows), BLOCK_D] of one head; 0 in columns from D on and, where CHECKED, in rows from num_rows on.

    Zeros, not whatever follows the sequence: its neighbour may hold a NaN, and 0 * NaN would leak.
    """
    cols = tl.arange(0, BLOCK_D)
    pointers = ptr + rows[:, None] * row_stride + cols[None, :]
    if CHECKED:
        if D == BLOCK_D:
            return tl.load(pointers, mask=(rows < num_rows)[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=(rows < num_rows)[:, None] & (cols < D)[None, :], other=0.0)
    else:
        if D == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(cols < D)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, row_stride, rows, num_rows, tile, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores tile [len(rows), BLOCK_D] of one head in ptr's dtype."""
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None]
    if D != BLOCK_D:
        mask = mask & (cols < D)[None, :]
    tl.store(ptr + rows[:, None] * row_stride + cols[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_positions(coords_ptr, rows, num_rows):
    """Positions, uint32, of a sequence's tokens; coords_ptr is that of its first token."""
    return tl.load(coords_ptr + rows * 2 + 1, mask=rows < num_rows, other=0).to(tl.uint32)


@triton.jit
def load_names(coords_ptr, rows, num_rows):
    """(batch row, position), uint32, of a sequence's tokens; coords_ptr is that of its first token."""
    batch_row = tl.load(coords_ptr + rows * 2, mask=rows < num_rows, other=0).to(tl.uint32)
    return batch_row, load_positions(coords_ptr, rows, num_rows)


@triton.jit
def load_lse(ptr, rows, num_rows, CHECKED: tl.constexpr):
    """Log-sum-exp in base 2; +inf, whose exp2(-lse) is 0, for queries that do not exist or see no key."""
    if CHECKED:
        lse = tl.load(ptr + rows, mask=rows < num_rows, other=float("inf"))
        return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    else:
        return tl.load(ptr + rows) * LOG2E


@triton.jit
def keep_tile(drop, batch_row, position, first_key, BLOCK_N: tl.constexpr):
    """The dropout mask of a tile [BLOCK_M, BLOCK_N] of probabilities, as `reference/dropout.py` defines it.

    batch_row, position (uint32 [BLOCK_M]): names of the queries. first_key: ordinal of the tile's first key, a multiple
    of 32.
    Returns: bool [BLOCK_M, BLOCK_N], True where kept.

    The 8 values of a block are the columns 8i + 2j + e of 32 that one thread of a tensor core's accumulator holds (j:
    its number among 4 neighbours). Its rows are r and 8 + r of the 16 of its warp, which follow one another (h). So
    words are drawn as [h, group, warp, r, j], which Triton deals out to threads in just this way, its last dimensions
    over a warp, the one before them over warps: what moves is names of registers. As [M, groups * 4] it would deal them
    out otherwise, and send all words through shared memory.
    """
    WARPS: tl.constexpr = position.shape[0] // 16
    GROUPS: tl.constexpr = BLOCK_N // 32
    block = (drop.head * _BLOCKS_PER_HEAD + first_key // 8).to(tl.uint32) + tl.arange(0, GROUPS * 4).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        tl.reshape(block, [1, GROUPS, 1, 1, 4]), _by_warp(position), _by_warp(batch_row), drop.site.to(tl.uint32),
        drop.k0, drop.k1,
    )  # fmt: skip
    # Joining words by the bits of i, slowest first, and halves last: see `_math.keep_values`.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    values = tl.reshape(tl.join(words << 16, words), [2, GROUPS, WARPS, 8, 4, 4, 2])  # [h, group, warp, r, j, i, e]
    values = tl.permute(values, [2, 0, 3, 1, 5, 4, 6])  # [warp, h, r, group, i, j, e]
    return tl.reshape(values, [position.shape[0], BLOCK_N]) > drop.drop_max.to(tl.uint32)


@triton.jit
def dropped(p, keep, scale):
    """p where kept, else 0. scale: any finite number that is not known when compiling.

    Of a 0 that is known LLVM makes a choice between numbers that are rounded already, two to a register: three
    instructions where this takes one. (What is used twice is not rounded first: backward needs no such 0.)
    """
    return tl.where(keep, p, scale * 0.0)


@triton.jit
def _by_warp(x):
    """[M] as [h, 1, warp, r, 1], of which it is number 16 * warp + 8 * h + r."""
    WARPS: tl.constexpr = x.shape[0] // 16
    return tl.reshape(tl.permute(tl.reshape(x, [WARPS, 2, 8]), [1, 0, 2]), [2, 1, WARPS, 8, 1])


@triton.jit
def gradients_of_scores(p, w, dw, delta, DIFFER: tl.constexpr):
    """dS / z [M, N] = w * dw - p * delta. DIFFER: w is not p.

    Written as it is, dropout selects w alone, not dw too. Where w is p, p * (dw - delta) is a few percent faster (an
    H200, S = 512: 266 for 283 us of all backward), with as many instructions.
    """
    if DIFFER:
        return w * dw - p * delta[:, None]
    else:
        return p * (dw - delta[:, None])


@triton.jit
def bias_at(bias, row_stride, head_stride, row, head):
    """A bias moved on to one row of the batch and head.

    Its extent is negative for a row past the end. Nothing beyond is read: where no one checks that a bias reaches all
    rows and positions, one that does not must not read foreign memory.
    """
    offset = row.to(tl.uint32).to(tl.int64) * row_stride + head * head_stride
    return Bias(bias.ptr + offset, bias.q_stride, bias.k_stride, bias.extent - offset)


@triton.jit
def _bias_tile(bias, position_q, position_k, mask):
    """Tile [M, N], fp32, of a bias at the tokens' positions; 0 where mask is False."""
    offsets = position_q.to(tl.int64)[:, None] * bias.q_stride + position_k.to(tl.int64)[None, :] * bias.k_stride
    return tl.load(bias.ptr + offsets, mask=mask & (offsets < bias.extent), other=0.0).to(tl.float32)


@triton.jit
def mask_scores(scores, exists, position_q, position_k, bias, CAUSAL: tl.constexpr):
    """Scores in base 2 with the bias added and -inf where a score does not exist or causality hides the key.

    exists (bool, broadcastable to the tile): both tokens exist. bias: a `Bias`. Positions may be None where
    neither bias nor causality asks.
    """
    if bias.ptr is not None:
        scores += _bias_tile(bias, position_q, position_k, exists) * LOG2E
    if CAUSAL:
        exists = exists & (position_k[None, :] <= position_q[:, None])
    return tl.where(exists, scores, float("-inf"))


@triton.jit
def visible_keys(
    coords_q_ptr, coords_k_ptr, first_query, num_queries, num_keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_PLAIN: tl.constexpr,
):  # fmt: skip
    """(end, plain): a block of queries sees no key from `end` on; tiles up to key `plain` are plain ones.

    Positions ascend, so the n-th key stands at the first one's position + n or later, and no later than the last key's
    position less what still follows: bounds that are exact where positions have no holes, and safe where they have.
    """
    end = num_keys
    plain = num_keys
    if CAUSAL:  # noqa: SIM102 -- known when compiling; joined to the next it would not be
        if num_keys > 0:
            last_query = tl.minimum(first_query + BLOCK_M, num_queries) - 1
            last_position = tl.load(coords_q_ptr + last_query * 2 + 1)
            end = tl.minimum(num_keys, last_position - tl.load(coords_k_ptr + 1) + 1)
            last_key_position = tl.load(coords_k_ptr + (num_keys - 1) * 2 + 1)
            seen_by_all = tl.load(coords_q_ptr + first_query * 2 + 1) - last_key_position + num_keys
            plain = tl.maximum(tl.minimum(seen_by_all, num_keys), 0)
    if HAS_PLAIN:
        return end, plain // BLOCK_N * BLOCK_N
    else:
        return end, 0
