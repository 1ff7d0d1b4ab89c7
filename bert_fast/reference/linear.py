"""A linear layer: y = x W^T + b.

forward     y       = x W^T + b                 [T, N]
backward    dx      = dy W                      [T, K]
            dweight = dy^T x                    [N, K]
            dbias   = sum over rows of dy       [N]

Parameters may be wider than activations: an fp32 weight beside a half-precision x gets an fp32 gradient. A back-end may
round it to x's dtype before it multiplies; here products are taken wide.
"""

from torch import Tensor

from bert_fast.reference.precision import wide

__all__ = ["linear_bwd", "linear_fwd"]


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y = x W^T + b.

    x (Tensor [T, K]); weight (Tensor [N, K]), bias (Tensor [N] or None): dtype of x, or fp32 beside half precision.
    Returns: y (Tensor [T, N], dtype of x).
    """
    y = wide(x) @ wide(weight).T
    return (y if bias is None else y + wide(bias)).to(x.dtype)


def linear_bwd(
    dy: Tensor, x: Tensor | None, weight: Tensor, wants_dx: bool, wants_dweight: bool, wants_dbias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `linear_fwd`, None for those that are not wanted.

    dy (Tensor [T, N], dtype of x); x may be None where dweight is not wanted.
    Returns: dx (Tensor [T, K], dtype of x); dweight (Tensor [N, K]), dbias (Tensor [N]), dtype of weight.
    """
    dy_wide = wide(dy)
    dx = dweight = dbias = None
    if wants_dx:
        dx = (dy_wide @ wide(weight)).to(dy.dtype)
    if wants_dweight:
        assert x is not None
        dweight = (dy_wide.T @ wide(x)).to(weight.dtype)
    if wants_dbias:
        dbias = dy_wide.sum(0).to(weight.dtype)
    return dx, dweight, dbias
