"""The three projections of self-attention: q = x Wq^T + bq, and k, v alike.

    forward     q, k, v = x Wq^T + bq, x Wk^T + bk, x Wv^T + bv         each [T, A*D]
    backward    dx  = dq Wq + dk Wk + dv Wv                             [T, H]
                dW* = d*^T x                                            [A*D, H]
                db* = sum over rows of d*                               [A*D]

Written as three products because the paper has three; a back-end may run them as one of [T, H] x [3*A*D, H]^T.
Saved for backward: x. Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2.
"""

from torch import Tensor

from bert_fast.reference.linear import linear_fwd
from bert_fast.reference.precision import wide

__all__ = ["qkv_projection_bwd", "qkv_projection_fwd"]


def qkv_projection_fwd(
    x: Tensor, wq: Tensor, bq: Tensor, wk: Tensor, bk: Tensor, wv: Tensor, bv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The projections of x.

    x (Tensor [T, H]); wq, wk, wv (Tensors [A*D, H]); bq, bk, bv (Tensors [A*D]).
    Returns: q, k, v (Tensors [T, A*D], dtype of x).
    """
    return linear_fwd(x, wq, bq), linear_fwd(x, wk, bk), linear_fwd(x, wv, bv)


def qkv_projection_bwd(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `qkv_projection_fwd`.

    dq, dk, dv (Tensors [T, A*D]).
    Returns: dx [T, H], then dwq, dbq, dwk, dbk, dwv, dbv (weights [A*D, H], biases [A*D]).
    """
    dq_wide, dk_wide, dv_wide, x_wide = wide(dq), wide(dk), wide(dv), wide(x)
    dx = dq_wide @ wide(wq) + dk_wide @ wide(wk) + dv_wide @ wide(wv)
    return (
        dx.to(x.dtype),
        (dq_wide.T @ x_wide).to(wq.dtype),
        dq_wide.sum(0).to(wq.dtype),
        (dk_wide.T @ x_wide).to(wk.dtype),
        dk_wide.sum(0).to(wk.dtype),
        (dv_wide.T @ x_wide).to(wv.dtype),
        dv_wide.sum(0).to(wv.dtype),
    )
