"""The three kernels of LAMB; described in `optimizer.py`."""

import triton
import triton.language as tl

from bert_fast.triton._multi_tensor import (
    VECTOR,
    address,
    chunk,
    current,
    direction,
    load,
    moments,
    places,
    store,
    sums_of_squares,
    whole_vectors,
)


@triton.jit
def _lamb_moments_tile(
    p_ptr, g_ptr, m_ptr, v_ptr, master_ptr, offs, limit,
    factor, correction, beta1, weight1, weight2, eps, decay,
    HAS_MASTER: tl.constexpr,
):  # fmt: skip
    """Stores m and v, and masters of parameters that were written to; returns p and u, both 0 past the limit."""
    m, v = moments(g_ptr, m_ptr, v_ptr, offs, limit, factor, beta1, weight1, weight2)
    p = load(master_ptr, offs, limit)
    if HAS_MASTER:
        p, written = current(p, p_ptr, offs, limit)
        tl.store(places(master_ptr, offs, True), p, mask=written & (offs < limit))
    store(m_ptr, offs, m, limit)
    store(v_ptr, offs, v, limit)
    # Past the limit m is 0, but 0 / eps is no number where eps is 0.
    u = tl.where(offs < limit, correction * direction(m, v, eps) + decay * p, 0.0)
    return p.to(tl.float64), u.to(tl.float64)


@triton.jit(do_not_specialize=["first_grad", "n_tensors"])
def lamb_moments_kernel(
    grads_ptr, state_ptr, entries_ptr, sizes_ptr, scalars_ptr, shared_ptr, partial_ptr,
    first_grad, n_tensors, beta1, weight1, weight2, eps, decay,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, HAS_MASTER: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m and v of a chunk, and its sums of p^2 and u^2 (partial, fp64 [chunks, 2]); from the last chunk to the first."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    tensor, start, length = chunk(entries_ptr, sizes_ptr, index, CHUNK)
    g_ptr = address(grads_ptr + first_grad, tensor, GRAD_TYPE, ALIGNED) + start
    p_ptr = address(state_ptr, tensor, PARAM_TYPE, ALIGNED) + start
    m_ptr = address(state_ptr + n_tensors, tensor, tl.float32, ALIGNED) + start
    v_ptr = address(state_ptr + 2 * n_tensors, tensor, tl.float32, ALIGNED) + start
    if HAS_MASTER:
        master_ptr = address(state_ptr + 3 * n_tensors, tensor, tl.float32, ALIGNED) + start
    else:
        master_ptr = p_ptr
    correction = tl.load(scalars_ptr + tensor * 2)
    eps *= tl.load(scalars_ptr + tensor * 2 + 1)
    factor = tl.load(shared_ptr)
    length = tl.where(tl.load(shared_ptr + 2) == 0.0, 0, length)  # the step is skipped
    vectors = whole_vectors(length)
    p_squares = tl.zeros([BLOCK // 4], tl.float64)
    u_squares = tl.zeros([BLOCK // 4], tl.float64)
    for block in tl.range(0, vectors, BLOCK):
        p, u = _lamb_moments_tile(
            p_ptr, g_ptr, m_ptr, v_ptr, master_ptr, block + tl.arange(0, BLOCK), vectors,
            factor, correction, beta1, weight1, weight2, eps, decay, HAS_MASTER,
        )  # fmt: skip
        p_squares += sums_of_squares(p)
        u_squares += sums_of_squares(u)
    p_sum = tl.sum(p_squares)
    u_sum = tl.sum(u_squares)
    if vectors < length:
        p, u = _lamb_moments_tile(
            p_ptr, g_ptr, m_ptr, v_ptr, master_ptr, vectors + tl.arange(0, VECTOR), length,
            factor, correction, beta1, weight1, weight2, eps, decay, HAS_MASTER,
        )  # fmt: skip
        p_sum += tl.sum(p * p)
        u_sum += tl.sum(u * u)
    tl.store(partial_ptr + index * 2, p_sum)
    tl.store(partial_ptr + index * 2 + 1, u_sum)


@triton.jit
def lamb_ratio_kernel(first_ptr, partial_ptr, ratios_ptr, BLOCK: tl.constexpr):
    """ratios (fp32 [n]): |p| / |u| of one tensor per program; 1 where either is 0."""
    tensor = tl.program_id(0)
    end = tl.load(first_ptr + tensor + 1)
    p_squares = tl.zeros([BLOCK], tl.float64)
    u_squares = tl.zeros([BLOCK], tl.float64)
    for block in tl.range(tl.load(first_ptr + tensor), end, BLOCK):
        chunk = block + tl.arange(0, BLOCK)
        p_squares += tl.load(partial_ptr + chunk * 2, mask=chunk < end, other=0.0)
        u_squares += tl.load(partial_ptr + chunk * 2 + 1, mask=chunk < end, other=0.0)
    p_norm = tl.sqrt(tl.sum(p_squares))
    u_norm = tl.sqrt(tl.sum(u_squares))
    ratio = tl.where((p_norm == 0.0) | (u_norm == 0.0), 1.0, p_norm / tl.where(u_norm == 0.0, 1.0, u_norm))
    tl.store(ratios_ptr + tensor, ratio.to(tl.float32))


@triton.jit
def _lamb_update_tile(
    p_ptr, m_ptr, v_ptr, master_ptr, offs, limit, correction, rate, eps, decay,
    HAS_MASTER: tl.constexpr,
):  # fmt: skip
    # Without masters there are no two dtypes that are stored.
    p = load(master_ptr, offs, limit, HAS_MASTER)
    m, v = load(m_ptr, offs, limit, HAS_MASTER), load(v_ptr, offs, limit, HAS_MASTER)
    u = correction * direction(m, v, eps) + decay * p
    p -= rate * u
    store(master_ptr, offs, p, limit, HAS_MASTER)
    if HAS_MASTER:
        store(p_ptr, offs, p, limit)


@triton.jit(do_not_specialize=["n_tensors"])
def lamb_update_kernel(
    state_ptr, entries_ptr, sizes_ptr, scalars_ptr, shared_ptr, ratios_ptr,
    n_tensors, eps, decay,
    PARAM_TYPE: tl.constexpr, HAS_MASTER: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p of a chunk, from m and v; from the first chunk to the last."""
    tensor, start, length = chunk(entries_ptr, sizes_ptr, tl.program_id(0), CHUNK)
    p_ptr = address(state_ptr, tensor, PARAM_TYPE, ALIGNED) + start
    m_ptr = address(state_ptr + n_tensors, tensor, tl.float32, ALIGNED) + start
    v_ptr = address(state_ptr + 2 * n_tensors, tensor, tl.float32, ALIGNED) + start
    if HAS_MASTER:
        master_ptr = address(state_ptr + 3 * n_tensors, tensor, tl.float32, ALIGNED) + start
    else:
        master_ptr = p_ptr
    correction = tl.load(scalars_ptr + tensor * 2)
    eps *= tl.load(scalars_ptr + tensor * 2 + 1)
    rate = tl.load(shared_ptr + 1) * tl.load(ratios_ptr + tensor)
    length = tl.where(tl.load(shared_ptr + 2) == 0.0, 0, length)  # the step is skipped
    vectors = whole_vectors(length)
    for block in tl.range(0, vectors, BLOCK):
        _lamb_update_tile(
            p_ptr, m_ptr, v_ptr, master_ptr, block + tl.arange(0, BLOCK), vectors,
            correction, rate, eps, decay, HAS_MASTER,
        )  # fmt: skip
    if vectors < length:
        _lamb_update_tile(
            p_ptr, m_ptr, v_ptr, master_ptr, vectors + tl.arange(0, VECTOR), length,
            correction, rate, eps, decay, HAS_MASTER,
        )  # fmt: skip
