"""Counter-based dropout: a mask is a pure function of (seed, site, row, position, column).

This file is the specification; every back-end draws the same bits. Random bits come from Philox4x32 with 7 rounds
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3: 7 rounds pass BigCrush):

    key      = (low 32 bits, high 32 bits) of the int64 seed
    counter  = (column // 8, position, row, site)
    output   = 4 words of 32 bits = 8 values of 16 bits, little end first: value j belongs to column % 8 == j
    keep     = value >= round(p * 65536)
    y        = x * 65536 / (65536 - round(p * 65536)) where kept, else 0

`row` is the sequence's index in the original batch and `position` the token's index in its sequence, so a padded and a
packed run, a recomputed forward and a backward draw the same mask. p is thus rounded to a multiple of 2**-16 and the
scale is exact for the rounded value: E[y] = x.

Attention probabilities use the position of the query, and columns of which every head has HEAD_STRIDE. A key is named
by its ordinal n among the kept keys of its sequence. Its 16-bit value is not that of column n: blocks gather the 8
probabilities of a query that one thread of a tensor core's accumulator holds (columns 8i + 2j + {0, 1} of 32, j the
thread), so that a kernel draws them where they are used:

    block = (head * HEAD_STRIDE + n // 32 * 32) // 8 + n % 8 // 2        value = 2 * (n % 32 // 8) + n % 2

Example: keys 0, 1, 8, 9, 16, 17, 24, 25 are the values of block 0, keys 2, 3, 10, 11, 18, 19, 26, 27 those of block 1.
"""

from enum import IntEnum

import torch
from torch import Tensor

PHILOX_ROUNDS = 7
_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers of Philox4x32
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Weyl increments of the key
_LOW = 0xFFFFFFFF

HEAD_STRIDE = 65536  # columns set aside for one head's keys: sequences up to 65,536 tokens
KINDS_PER_LAYER = 8
_MOST_COUNTERS = 2**22  # drawn at once for attention, of all heads together; an intermediate tensor of them has 32 MiB


class DropoutSite(IntEnum):
    """The places where BERT, or a model like it, drops, within one layer; embeddings and heads count as layer 0."""

    EMBEDDING = 0
    ATTENTION_PROBS = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3
    CROSS_ATTENTION_PROBS = 4
    CROSS_ATTENTION_OUTPUT = 5
    HEAD = 6
    MLP_ACTIVATION = 7


def dropout_site(kind: DropoutSite, layer: int = 0) -> int:
    """The number that stands for one call site in the counter: layer * 8 + kind.

    Args:
        kind: the place within the layer.
        layer: counted from 0; 0 for embeddings and heads.

    Returns:
        site (int), as `ops.dropout` takes it.

    Example:
        >>> ops.dropout_site(ops.DropoutSite.ATTENTION_OUTPUT, layer=3)
        26
    """
    return layer * KINDS_PER_LAYER + int(kind)


def _multiply_wide(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * constant, for a in [0, 2**32) held in int64 (whose product would overflow)."""
    a_high, a_low = a >> 16, a & 0xFFFF
    low = a_low * constant
    high = a_high * constant + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words per counter.

    counter (4 Tensors, int64, broadcastable, each in [0, 2**32)): the block's name.
    seed (Tensor [1], int64): the key, read as an unsigned 64-bit number.
    Returns: 4 Tensors of the broadcast shape, int64 in [0, 2**32).
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply_wide(c0, _M0)
        high1, low1 = _multiply_wide(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def dropout_threshold(p: float) -> int:
    """16-bit values below this drop their element."""
    return round(p * 65536)


def dropout_scale(p: float) -> float:
    """What kept elements are multiplied by: 1 / (probability of keeping), 0 when nothing is kept."""
    kept = 65536 - dropout_threshold(p)
    return 65536 / kept if kept else 0.0


def _random_values(seed: Tensor, site: int, coords: Tensor, blocks: Tensor) -> Tensor:
    """16-bit values [T, 8 * len(blocks)] of the given column blocks (block = column // 8)."""
    row, position = coords[:, 0:1].long(), coords[:, 1:2].long()
    words = philox4x32((blocks[None, :], position, row, torch.full_like(row, site)), seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=-1).flatten(1)


def keep_mask(seed: Tensor, site: int, coords: Tensor, num_columns: int, p: float) -> Tensor:
    """The mask of columns 0 .. num_columns - 1.

    seed (Tensor [1], int64); coords (Tensor [T, 2], int32): (row, position) of every token.
    Returns: bool [T, num_columns], True where the element is kept.
    """
    blocks = torch.arange((num_columns + 7) // 8, device=coords.device)
    return _random_values(seed, site, coords, blocks)[:, :num_columns] >= dropout_threshold(p)


def attention_keep_mask(seed: Tensor, site: int, coords_q: Tensor, num_keys: int, num_heads: int, p: float) -> Tensor:
    """The mask of attention probabilities of one sequence.

    coords_q (Tensor [Sq, 2], int32): (row, position) of every query; num_keys: of the sequence.
    Returns: bool [A, Sq, Sk].
    """
    groups = (num_keys + 31) // 32  # of 32 keys, 4 blocks each
    starts = torch.arange(num_heads, device=coords_q.device)[:, None] * (HEAD_STRIDE // 8)
    blocks = starts + torch.arange(4 * groups, device=coords_q.device)  # [A, blocks]
    heads_at_once = max(1, _MOST_COUNTERS // max(1, len(coords_q) * 4 * groups))
    masks = []
    for some in blocks.split(heads_at_once):
        values = _random_values(seed, site, coords_q, some.flatten())
        # Within a group values come as [j, i, e] and keys stand at 8i + 2j + e.
        in_order = values.view(len(coords_q), len(some), groups, 4, 4, 2).transpose(3, 4).flatten(2)
        masks.append((in_order[:, :, :num_keys] >= dropout_threshold(p)).transpose(0, 1))
    return torch.cat(masks).contiguous()


def dropout_fwd(x: Tensor, dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int) -> Tensor:
    """y = x * keep * scale for x [T, H]; seed and coords may be None iff dropout_p is 0."""
    if dropout_p == 0.0:
        return x.clone()
    assert seed is not None and coords is not None
    return x * keep_mask(seed, site, coords, x.shape[1], dropout_p).to(x.dtype) * dropout_scale(dropout_p)


def dropout_bwd(dy: Tensor, dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int) -> Tensor:
    """dx = dy * keep * scale: the same map as forward."""
    return dropout_fwd(dy, dropout_p, seed, coords, site)
