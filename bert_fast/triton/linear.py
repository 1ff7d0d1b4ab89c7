"""y = x W^T + b on a GPU, and its gradients: three products, each by our kernel or the library's (`_gemm.py`).

Forward:   y = x W^T + b
Backward:  dx = dy W;   dW = dy^T x;   db = sum over rows of dy

Shapes: x, dx [T, K]; y, dy [T, N]; W, dW [N, K]; b, db [N].
Bytes moved, elements of e bytes: each product reads its operands and writes its result, e (T K + N K + T N) forward
and as many for dx; dW is written in its own dtype. db reads dy once more, e T N: no program of the products that read
it sees whole columns. A second gradient of x is added within the product, in its memory: e T K more, where a kernel of
its own moves 3 e T K.
Parameters in fp32 beside half precision are rounded to it for the products (W: 6 N K bytes more); their gradients are
the products' fp32 accumulators, never rounded in between. Nothing is recomputed; x and W are saved.
Precision: accumulators and sums in fp32, TF32 as PyTorch is set. Deterministic.
"""

from collections.abc import Set

import torch
from torch import Tensor

from bert_fast.reference.linear import Linear
from bert_fast.triton._gemm import narrowed, product


def linear_fwd(a: Linear) -> Tensor:
    """y [T, N], as `reference.linear`, new and contiguous."""
    return product(a.x, narrowed(a.weight, a.x).t(), a.bias)


def linear_bwd(a: Linear, dy: Tensor, wants: Set[str], onto: Tensor | None = None) -> dict[str, Tensor]:
    """Gradients by name, as `reference.linear`."""
    made = {}
    if "x" in wants:
        made["x"] = product(dy, narrowed(a.weight, dy), out=onto, accumulate=onto is not None)
    if "weight" in wants:
        made["weight"] = weight_gradient(dy, a.x, a.weight)
    if "bias" in wants:
        made["bias"] = dy.sum(0, dtype=a.weight.dtype)
    return made


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Returns dy^T x [N, K] in the weight's dtype.

    Raises:
        TypeError: the weight was cast after the forward pass, to another dtype than that of dy or fp32.
    """
    if weight.dtype not in (dy.dtype, torch.float32):
        raise TypeError(
            f"weight: expected dtype {dy.dtype} (that of dy) or torch.float32 in backward, got {weight.dtype}; "
            "do not cast parameters between forward and backward"
        )
    return product(dy.t(), x, out_dtype=weight.dtype)
