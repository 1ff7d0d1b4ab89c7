"""Device helpers of kernels over lists of tensors: which chunk a program treats, where it lies, how tiles are accessed.

Lengths are cut into whole vectors and a rest of fewer than VECTOR elements. Where the compiler can see that a mask ends
at a whole vector, it keeps accesses of 128 bits under it; so all but the rest of a tensor moves in whole vectors,
whatever its size.
"""

import triton
import triton.language as tl

VECTOR = tl.constexpr(8)  # elements: 128 bits of fp16 and bf16, twice that of fp32


@triton.jit
def chunk(entries_ptr, sizes_ptr, index, CHUNK: tl.constexpr):
    """(tensor, first element, number of elements) of the chunk `index` of a list."""
    entry = tl.load(entries_ptr + index)
    tensor = entry >> 32
    start = (entry & 0xFFFFFFFF) * CHUNK  # int64: tensors may have more than 2^31 elements
    return tensor, start, tl.minimum(tl.load(sizes_ptr + tensor) - start, CHUNK).to(tl.int32)


@triton.jit
def address(table_ptr, tensor, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to a tensor of a list; ALIGNED promises that it is a multiple of 16 bytes."""
    ptr = tl.load(table_ptr + tensor).to(tl.pointer_type(TYPE))
    if ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def places(ptr, offs, FOURS: tl.constexpr):
    """The addresses of a tile. FOURS: a thread has 4 neighbours of it, whatever their dtype.

    Left alone, Triton gives a thread 128 bits: 8 neighbours of half precision, but 4 where fp32 is stored. So a kernel
    that does both would exchange tiles through shared memory. The hint claims less than is true.
    """
    if FOURS:
        return tl.max_contiguous(ptr + offs, 4)
    else:
        return ptr + offs


@triton.jit
def load(ptr, offs, limit, FOURS: tl.constexpr = True):
    return tl.load(places(ptr, offs, FOURS), mask=offs < limit, other=0.0).to(tl.float32)


@triton.jit
def store(ptr, offs, x, limit, FOURS: tl.constexpr = True):
    tl.store(places(ptr, offs, FOURS), x.to(ptr.dtype.element_ty), mask=offs < limit)


@triton.jit
def current(master, p_ptr, offs, limit):
    """The weights of a tile, and whether they are not the masters.

    A parameter that is no longer its rounded master was written to since: its value is what counts.
    """
    p = load(p_ptr, offs, limit)
    written = master.to(p_ptr.dtype.element_ty).to(tl.float32) != p
    return tl.where(written, p, master), written


@triton.jit
def whole_vectors(length):
    """The largest multiple of VECTOR up to `length`, in a form that tells the compiler that it is one."""
    return (length // VECTOR) * VECTOR


@triton.jit
def moments(g_ptr, m_ptr, v_ptr, offs, limit, factor, beta1, weight1, weight2):
    """The new m and v of a tile; weight2 is 1 - beta2."""
    g = load(g_ptr, offs, limit) * factor
    m = load(m_ptr, offs, limit) * beta1 + g * weight1
    v = load(v_ptr, offs, limit)
    return m, v + (g * g - v) * weight2


@triton.jit
def direction(m, v, eps):
    """m / (sqrt(v) + eps).

    For an eps that was multiplied by sqrt(c_2), this times sqrt(c_2) / c_1 is m_hat / (sqrt(v_hat) + eps).
    """
    # The fast square root flushes subnormal numbers: where eps is 0 too, that would divide by 0.
    return m / (tl.sqrt_rn(v) + eps)


@triton.jit
def sums_of_squares(x):
    """The squares of a tile (fp64), added in fours: 4 neighbours lie in one thread, whatever dtype they came from."""
    return tl.sum(tl.reshape(x * x, [x.shape[0] // 4, 4]), 1)
