"""Device helpers that several kernel families share: pure functions of tiles, no loads or stores.

Random bits follow `reference/dropout.py` to the bit. What makes them cheap here:

- One Philox call yields 16 bytes = 8 elements, and 8 neighbouring bf16 or fp16 elements are what one thread loads at
  once (128 bits): its random bits are born in the registers that need them, no layout conversion, no shared memory.
  fp32 threads hold 4 neighbours: two threads draw the same block and each keeps its half of the words.
- 7 rounds of 2 wide multiplications and 2 three-way xors. Tiles are not broadcast before round 3: counters enter as a
  row of columns and a column of rows, so rounds 1 and 2 touch each row and each column once, not each element.
- A 16-bit value is compared where it lies, in the upper half of a 32-bit word: the lower half cannot change the answer
  (see `keep_values`), so half of the values need no extraction at all.
"""

import triton
import triton.language as tl

PHILOX_M0 = tl.constexpr(0xD2511F53)  # multipliers and Weyl increments of Philox4x32: Salmon et al. 2011, table 2
PHILOX_M1 = tl.constexpr(0xCD9E8D57)
PHILOX_W0 = tl.constexpr(0x9E3779B9)
PHILOX_W1 = tl.constexpr(0xBB67AE85)
PHILOX_ROUNDS = tl.constexpr(7)


@triton.jit
def add_pairs(a0, a1, b0, b1):
    """Combine function of `tl.reduce` that sums two tiles in one pass over the threads."""
    return a0 + b0, a1 + b1


@triton.jit
def row_major(ptr, offset, UNIT: tl.constexpr):
    """Addresses of a tile [CHUNKS, ROWS, CHUNK_COLS]; rows start at multiples of UNIT elements.

    A hint has Triton lay threads over rows, not chunks: it orders dimensions by how contiguous addresses are along
    them, chunks and rows tie at 1, and versions break the tie differently (3.6 takes chunks first, so that several
    warps would share a row). So 2 is claimed for rows. That decides nothing else where accesses are wider than an
    element. Where UNIT is odd they are not, Triton 3.9 reads a row for its neighbour, and the claim is 1.
    """
    return tl.max_contiguous(ptr + offset, [1, min(2 - UNIT % 2, offset.shape[1]), offset.shape[2]])


@triton.jit
def _multiply_wide(a, factor: tl.constexpr):
    """Upper and lower 32 bits of a * factor; one 32 x 32 -> 64 bit multiplication."""
    product = a.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def split_seed(seed):
    """Philox key of an int64 seed: its lower and upper 32 bits."""
    bits = seed.to(tl.uint64)
    return bits.to(tl.uint32), (bits >> 32).to(tl.uint32)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four random words per counter (c0, c1, c2, c3) under the key (k0, k1); uint32 tiles that broadcast."""
    for _ in tl.static_range(PHILOX_ROUNDS):
        high0, low0 = _multiply_wide(c0, PHILOX_M0)
        high1, low1 = _multiply_wide(c2, PHILOX_M1)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += PHILOX_W0
        k1 += PHILOX_W1
    return c0, c1, c2, c3


@triton.jit
def keep_values(k0, k1, site, row, position, column, drop_max, VECTOR: tl.constexpr):
    """The dropout mask of a tile [A, B, N] whose last dimension runs over neighbouring columns.

    row, position (uint32 tiles that broadcast to [A, B, 1]): names of the tokens.
    column (uint32 tile that broadcasts to [A, B, N / VECTOR]): first column of every VECTOR neighbours, a multiple of
        VECTOR; VECTOR is 8 (bf16, fp16) or 4 (fp32): the elements that a thread loads at once.
    drop_max (uint32): (threshold << 16) - 1. With v the 16-bit value and x any 16 bits,
        v >= threshold  <=>  (v << 16 | x) > (threshold << 16) - 1, for every threshold from 1 to 65536.
    Returns: bool [A, B, N], True where the element is kept.

    Element j of a block takes half j % 2 (0: lower) of word j // 2. Joining words by the bits of j, slowest first,
    lays them out in order: w0 with w2 and w1 with w3 make pairs indexed by bit 2, those joined are indexed by bit 1,
    lower and upper halves by bit 0. Example, VECTOR = 8: element 5 = 0b101 is bit 2 = 1 (w2 or w3), bit 1 = 0 (w2),
    bit 0 = 1 (upper half).
    """
    w0, w1, w2, w3 = philox4x32(column >> 3, position, row, site, k0, k1)
    if VECTOR == 8:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    else:
        tl.static_assert(VECTOR == 4)
        upper_half = (column & 4) != 0
        words = tl.join(tl.where(upper_half, w2, w0), tl.where(upper_half, w3, w1))
    values = tl.join(words << 16, words)
    return tl.reshape(values, [w0.shape[0], w0.shape[1], w0.shape[2] * VECTOR]) > drop_max
