"""y = act(x W^T + b) on a GPU: the activation in the epilogue of the product (`_gemm.py`).

Forward:   pre = x W^T + b;   y = act(pre)
Backward:  dpre = dy * act'(pre);   dx = dpre W;   dW = dpre^T x;   db = sum over rows of dpre

Shapes: x, dx [T, K]; y, pre, dy, dpre [T, N]; W, dW [N, K]; b, db [N].
Bytes moved per token on [T, N] tensors, elements of e bytes; "separate" is a product with a bias and a kernel for the
activation. BERT's N is 4 H, so in half precision e N is 8 H bytes:
    forward, pre saved       separate: pre; pre, y = 3 e N              fused: pre, y = 2 e N           saves  8 H
    forward, pre not saved   separate: the same                         fused: y = e N                  saves 16 H
    backward, pre saved      dy, pre, dpre = 3 e N: no product comes before, the kernel of bias_gelu makes dpre and db
    backward, recomputed     separate: pre; dy, pre, dpre = 4 e N       fused: dy, dpre = 2 e N         saves 16 H
The products for dx and dW then read dpre; db comes out of the kernel that makes it, from registers.
Saved: x, W, and pre (e N bytes a token) unless it is recomputed, which costs the forward's product again.
Precision: the activation takes the fp32 accumulator where our kernel runs, the product rounded to x's dtype where the
library does. Sums in fp32; gradients of fp32 parameters are never rounded to half precision. Deterministic.
Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415).
"""

import torch
from torch import Tensor

from bert_fast.kernels._gemm import product_activation, product_recomputed
from bert_fast.kernels.bias_gelu import bias_gelu_bwd
from bert_fast.kernels.linear import linear_bwd

__all__ = ["linear_gelu_bwd", "linear_gelu_fwd"]


def linear_gelu_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, hidden_act: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """(y, pre); arguments and results as in `reference/linear_gelu.py`, any strides; results are contiguous."""
    return product_activation(x, weight.to(x.dtype).t(), bias, hidden_act, save_pre)


def linear_gelu_bwd(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    pre: Tensor | None,
    hidden_act: str,
    wants_dx: bool,
    wants_dweight: bool,
    wants_dbias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias); arguments and results as in `reference/linear_gelu.py`, any strides."""
    if pre is None:
        dpre, dbias = product_recomputed(x, weight.to(dy.dtype).t(), bias, dy, hidden_act, wants_dbias)
    else:
        # The kernel sums columns for the sake of a bias: one of zeros asks for the sums alone.
        zeros = pre.new_zeros(pre.shape[1], dtype=torch.float32) if wants_dbias else None
        dpre, dbias = bias_gelu_bwd(dy, pre, zeros, hidden_act)
    dx, dweight, _ = linear_bwd(dpre, x, weight, wants_dx, wants_dweight, False)
    return dx, dweight, None if dbias is None else dbias.to(weight.dtype)
