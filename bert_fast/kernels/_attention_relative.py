"""Device helpers of relative positions: scores against a window of the distance table, and their gradients."""

import triton
import triton.language as tl

__all__ = ["relative_dk", "relative_dq", "relative_scores"]


@triton.jit
def relative_scores(
    q, k, position_q, position_k, table_ptr, num_distances, D: tl.constexpr, BLOCK_D: tl.constexpr,
    KEY_TERM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R [M, N], R[i, j] = q_i . E[p_i - p_j + M - 1], plus k_j . E[...] where KEY_TERM."""
    tl.static_assert(False, "not written yet")


@triton.jit
def relative_dq(
    ds, position_q, position_k, table_ptr, num_distances, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[M, D]: sum over keys of ds[i, j] E[p_i - p_j + M - 1]."""
    tl.static_assert(False, "not written yet")


@triton.jit
def relative_dk(
    ds, position_q, position_k, table_ptr, num_distances, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[N, D]: sum over queries of ds[i, j] E[p_i - p_j + M - 1]."""
    tl.static_assert(False, "not written yet")
