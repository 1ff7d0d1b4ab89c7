"""y = x W^T + b on a GPU, and its gradients: three products, each by our kernel or the library's (`_gemm.py`).

Forward:   y = x W^T + b
Backward:  dx = dy W;   dW = dy^T x;   db = sum over rows of dy

Shapes: x, dx [T, K]; y, dy [T, N]; W, dW [N, K]; b, db [N].
Bytes moved, elements of e bytes: each product reads its operands and writes its result, e (T K + N K + T N) forward
and as many for dx; dW is written in its own dtype. db reads dy once more, e T N: no program of the products that read
it sees whole columns.
Parameters in fp32 beside half precision are rounded to it for the products (W: 6 N K bytes more); their gradients are
the products' fp32 accumulators, never rounded in between. Nothing is recomputed; x and W are saved.
Precision: accumulators and sums in fp32, TF32 as PyTorch is set. Deterministic.
"""

import torch
from torch import Tensor

from bert_fast.kernels._gemm import product

__all__ = ["linear_bwd", "linear_fwd"]


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [T, N]; arguments and result as in `reference/linear.py`, any strides; y is new and contiguous."""
    return product(x, weight.to(x.dtype).t(), bias)


def linear_bwd(
    dy: Tensor, x: Tensor | None, weight: Tensor, wants_dx: bool, wants_dweight: bool, wants_dbias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias); arguments and results as in `reference/linear.py`, any strides."""
    dx = product(dy, weight.to(dy.dtype)) if wants_dx else None
    dweight = product(dy.t(), x, out_dtype=weight.dtype) if wants_dweight else None
    dbias = dy.sum(0, dtype=torch.float32).to(weight.dtype) if wants_dbias else None
    return dx, dweight, dbias
