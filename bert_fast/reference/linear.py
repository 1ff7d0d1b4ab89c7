"""A linear layer: y = x W^T + b.

forward     y       = x W^T + b                 [T, N]
backward    dx      = dy W                      [T, K]
            dweight = dy^T x                    [N, K]
            dbias   = sum over rows of dy       [N]
"""

from torch import Tensor

from bert_fast.reference.precision import wide

__all__ = ["linear_bwd", "linear_fwd"]


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y = x W^T + b for x [T, K], weight [N, K], bias [N] or None; y [T, N] in the dtype of x."""
    y = wide(x) @ wide(weight).T
    return (y if bias is None else y + wide(bias)).to(x.dtype)


def linear_bwd(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `linear_fwd`: dx [T, K], dweight [N, K], dbias [N]."""
    dy_wide = wide(dy)
    dx = dy_wide @ wide(weight)
    dweight = dy_wide.T @ wide(x)
    dbias = dy_wide.sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)
