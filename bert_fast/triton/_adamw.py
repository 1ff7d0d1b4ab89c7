"""The kernel of AdamW; described in `optimizer.py`."""

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
    store,
    whole_vectors,
)


@triton.jit
def _adamw_tile(
    p_ptr, g_ptr, m_ptr, v_ptr, master_ptr, offs, limit,
    factor, rate, decay_rate, beta1, weight1, weight2, eps,
    HAS_MASTER: tl.constexpr,
):  # fmt: skip
    m, v = moments(g_ptr, m_ptr, v_ptr, offs, limit, factor, beta1, weight1, weight2)
    p = load(master_ptr, offs, limit)
    if HAS_MASTER:
        p, _ = current(p, p_ptr, offs, limit)
    # One subtraction from p: it is rounded once, however small the step.
    p -= decay_rate * p + rate * direction(m, v, eps)
    store(m_ptr, offs, m, limit)
    store(v_ptr, offs, v, limit)
    store(master_ptr, offs, p, limit)
    if HAS_MASTER:
        store(p_ptr, offs, p, limit)


@triton.jit(do_not_specialize=["first_grad", "n_tensors"])
def adamw_step_kernel(
    grads_ptr, state_ptr, entries_ptr, sizes_ptr, scalars_ptr, shared_ptr,
    first_grad, n_tensors, beta1, weight1, weight2, eps, decay,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, HAS_MASTER: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The whole step of a chunk; from the last chunk to the first."""
    tensor, start, length = chunk(entries_ptr, sizes_ptr, tl.num_programs(0) - 1 - tl.program_id(0), CHUNK)
    g_ptr = address(grads_ptr + first_grad, tensor, GRAD_TYPE, ALIGNED) + start
    p_ptr = address(state_ptr, tensor, PARAM_TYPE, ALIGNED) + start
    m_ptr = address(state_ptr + n_tensors, tensor, tl.float32, ALIGNED) + start
    v_ptr = address(state_ptr + 2 * n_tensors, tensor, tl.float32, ALIGNED) + start
    if HAS_MASTER:
        master_ptr = address(state_ptr + 3 * n_tensors, tensor, tl.float32, ALIGNED) + start
    else:
        master_ptr = p_ptr
    factor = tl.load(shared_ptr)
    lr = tl.load(shared_ptr + 1)
    rate = lr * tl.load(scalars_ptr + tensor * 2)
    eps *= tl.load(scalars_ptr + tensor * 2 + 1)
    decay_rate = lr * decay
    length = tl.where(tl.load(shared_ptr + 2) == 0.0, 0, length)  # the step is skipped
    vectors = whole_vectors(length)
    if vectors < length:  # first: after the loop its addresses would crowd the scalar registers of AMD
        _adamw_tile(
            p_ptr, g_ptr, m_ptr, v_ptr, master_ptr, vectors + tl.arange(0, VECTOR), length,
            factor, rate, decay_rate, beta1, weight1, weight2, eps, HAS_MASTER,
        )  # fmt: skip
    for block in tl.range(0, vectors, BLOCK):
        _adamw_tile(
            p_ptr, g_ptr, m_ptr, v_ptr, master_ptr, block + tl.arange(0, BLOCK), vectors,
            factor, rate, decay_rate, beta1, weight1, weight2, eps, HAS_MASTER,
        )  # fmt: skip
