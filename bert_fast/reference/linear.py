"""A linear layer: y = x W^T + b.

forward     y       = x W^T + b                 [T, N]
backward    dx      = dy W                      [T, K]
            dweight = dy^T x                    [N, K]
            dbias   = sum over rows of dy       [N]

Parameters may be wider than activations: an fp32 weight beside a half-precision x gets an fp32 gradient. A back-end may
round it to x's dtype before it multiplies; here products are taken wide.
"""

from collections.abc import Set
from typing import Annotated, NamedTuple

from torch import Tensor

from bert_fast.reference.precision import wide


class Linear(NamedTuple):
    """The arguments; parameters have the dtype of x or, beside half precision, fp32. Any strides."""

    x: Annotated[Tensor, "x T K"]
    weight: Annotated[Tensor, "p N K"]
    bias: Annotated[Tensor | None, "p N"]


def linear_fwd(a: Linear) -> Tensor:
    """y (Tensor [T, N], dtype of x)."""
    y = wide(a.x) @ wide(a.weight).T
    return (y if a.bias is None else y + wide(a.bias)).to(a.x.dtype)


def linear_bwd(a: Linear, dy: Tensor, wants: Set[str], onto: Tensor | None = None) -> dict[str, Tensor]:
    """Gradients by name, those that are wanted, of the shapes and dtypes of their fields.

    dy (Tensor [T, N], dtype of x); a.x is read where the gradient of weight is wanted, a.bias never: they may be None.
    onto (Tensor [T, K], dtype of x, or None): another gradient of x, which is added; its memory may be written over.
    """
    dy_wide = wide(dy)
    made = {}
    if "x" in wants:
        dx = (dy_wide @ wide(a.weight)).to(dy.dtype)
        made["x"] = dx if onto is None else dx.add_(onto)
    if "weight" in wants:
        made["weight"] = (dy_wide.T @ wide(a.x)).to(a.weight.dtype)
    if "bias" in wants:
        made["bias"] = dy_wide.sum(0).to(a.weight.dtype)
    return made
