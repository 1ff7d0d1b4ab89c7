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

from collections.abc import Set
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.linear import Linear, linear_bwd, linear_fwd


class QkvProjection(NamedTuple):
    """The arguments: all biases or none; parameters of the dtype of x or, beside half precision, fp32. Any strides."""

    x: Annotated[Tensor, "x T H"]
    wq: Annotated[Tensor, "p N H"]
    bq: Annotated[Tensor | None, "p N"]
    wk: Annotated[Tensor, "p N H"]
    bk: Annotated[Tensor | None, "p N"]
    wv: Annotated[Tensor, "p N H"]
    bv: Annotated[Tensor | None, "p N"]

    @property
    def parts(self) -> tuple[Linear, Linear, Linear]:
        """The three projections on their own."""
        return Linear(self.x, self.wq, self.bq), Linear(self.x, self.wk, self.bk), Linear(self.x, self.wv, self.bv)


def qkv_projection_fwd(a: QkvProjection) -> Tensor:
    """qkv (Tensor [T, 3N], dtype of x)."""
    return torch.cat([linear_fwd(part) for part in a.parts], dim=1)


def qkv_projection_bwd(
    a: QkvProjection, dqkv: Tensor, wants: Set[str], onto: Tensor | None = None
) -> dict[str, Tensor]:
    """Gradients by name, those of "x", "weight" and "bias" that are wanted.

    dqkv (Tensor [T, 3N], dtype of x); a.x is read where the gradient of the weights is wanted, biases never.
    onto: as in `linear_bwd`.
    Returns: x (Tensor [T, H], dtype of x); weight (Tensor [3N, H]), bias (Tensor [3N]): of the three projections one
        below the other, dtype of the weights.
    """
    return linear_bwd(Linear(a.x, torch.cat([a.wq, a.wk, a.wv]), None), dqkv, wants, onto)
