"""The three projections of self-attention as one: qkv = [q | k | v] with q = x Wq^T + bq, and k, v alike.

    W, b = [Wq; Wk; Wv], [bq; bk; bv]                                   [3N, H], [3N]
    forward     qkv = x W^T + b                                         [T, 3N], N = A * D
    backward    dx  = dqkv W                                            [T, H]
                dW  = dqkv^T x                                          [3N, H]
                db  = sum over rows of dqkv                             [3N]

A row of qkv holds a token's query, key and value side by side: viewed as [T, 3, A, D] it is what attention reads, and
the gradient that attention returns is dqkv as it stands. Parameters may be wider than x, see `reference/linear.py`.
Saved for backward: x. Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2.
"""

import torch
from torch import Tensor

from bert_fast.reference.linear import linear_bwd, linear_fwd

__all__ = ["qkv_projection_bwd", "qkv_projection_fwd"]


def qkv_projection_fwd(
    x: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor, bk: Tensor | None, wv: Tensor, bv: Tensor | None
) -> Tensor:
    """The projections of x.

    x (Tensor [T, H]); wq, wk, wv (Tensors [N, H]); bq, bk, bv (Tensors [N], or all None): dtype of x, or fp32 beside
    half precision.
    Returns: qkv (Tensor [T, 3N], dtype of x).
    """
    return torch.cat([linear_fwd(x, wq, bq), linear_fwd(x, wk, bk), linear_fwd(x, wv, bv)], dim=1)


def qkv_projection_bwd(
    dqkv: Tensor,
    x: Tensor | None,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wants_dx: bool = True,
    wants_dweight: bool = True,
    wants_dbias: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `qkv_projection_fwd`, None for those that are not wanted.

    dqkv (Tensor [T, 3N], dtype of x); x may be None where dweight is not wanted.
    Returns: dx (Tensor [T, H], dtype of x); dweight (Tensor [3N, H]), dbias (Tensor [3N]): of the three projections one
        below the other, dtype of the weights.
    """
    return linear_bwd(dqkv, x, torch.cat([wq, wk, wv]), wants_dx, wants_dweight, wants_dbias)
