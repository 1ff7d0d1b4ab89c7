"""y = act(x Wu^T + bu) Wd^T + bd on a GPU: six products, the activation and its derivative in epilogues (`_gemm.py`).

Forward:   pre = x Wu^T + bu, act = act(pre)                       one product, two results
           y = act Wd^T + bd                                       one product
Backward:  dpre = (dy Wd) * act'(pre), act = act(pre), dbu = sum over rows of dpre      one product, three results
           dWd = dy^T act;   dx = dpre Wu;   dWu = dpre^T x        one product each;   dbd = sum over rows of dy

Shapes: x, dx [T, H]; pre, act, dpre [T, I]; y, dy [T, N], N = H in BERT; Wu [I, H], bu [I], Wd [N, I], bd [N].
Bytes moved per token on [T, I] tensors by what is between the products, elements of e bytes. "Separate" is a product
with a bias, a kernel for the activation, one for its derivative, and act saved. I = 4 H: e I is 8 H in half precision.
    forward       separate: pre; pre, act = 3 e I            fused: pre, act = 2 e I                    saves 8 H
    backward      separate: dact; dact, pre, dpre = 4 e I    fused: pre, dpre, act = 3 e I              saves 8 H
    dbu           separate: reads dpre again, e I            fused: from registers                      saves 8 H
    recomputing   pre is written by a product of its own: e I more in backward, e I less in forward
With act saved backward would write e I less still, and keep e I bytes more per token and layer until then: see
docs/decisions/0009-mlp.md.
Saved: x, the weights, and pre (e I bytes a token) unless it is recomputed, which costs the first product again.
Precision: act and act' take fp32 accumulators where our kernel runs, products rounded to x's dtype where the library
does; in backward both are of pre as saved. Sums in fp32; gradients of fp32 parameters are never rounded to half
precision. Deterministic.
Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.3.
"""

import torch
from torch import Tensor

from bert_fast.kernels._gemm import product, product_activation, product_derivative
from bert_fast.kernels.bias_gelu import bias_gelu_fwd
from bert_fast.kernels.linear import linear_bwd

__all__ = ["mlp_bwd", "mlp_fwd"]


def mlp_fwd(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    hidden_act: str,
    save_pre: bool,
) -> tuple[Tensor, Tensor | None]:
    """(y, pre); arguments and results as in `reference/mlp.py`, any strides; results are contiguous."""
    act, pre = product_activation(x, up_weight.to(x.dtype).t(), up_bias, hidden_act, save_pre)
    return product(act, down_weight.to(x.dtype).t(), down_bias), pre


def mlp_bwd(
    dy: Tensor,
    x: Tensor | None,
    pre: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    hidden_act: str,
    wants_dx: bool,
    wants_dup_weight: bool,
    wants_dup_bias: bool,
    wants_ddown_weight: bool,
    wants_ddown_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dup_weight, dup_bias, ddown_weight, ddown_bias); all as in `reference/mlp.py`, any strides."""
    dx = dup_weight = dup_bias = ddown_weight = act = None
    wants_dpre = wants_dx or wants_dup_weight or wants_dup_bias
    if pre is None and (wants_dpre or wants_ddown_weight):
        pre = product(x, up_weight.to(dy.dtype).t(), up_bias)
    if wants_dpre:
        down = down_weight.to(dy.dtype)
        dpre, act, dup_bias = product_derivative(dy, down, pre, hidden_act, wants_ddown_weight, wants_dup_bias)
        dx, dup_weight, _ = linear_bwd(dpre, x, up_weight, wants_dx, wants_dup_weight, False)
        dup_bias = None if dup_bias is None else dup_bias.to(up_weight.dtype)
    elif wants_ddown_weight:
        act = bias_gelu_fwd(pre, None, hidden_act)
    if wants_ddown_weight:
        ddown_weight = product(dy.t(), act, out_dtype=down_weight.dtype)
    ddown_bias = dy.sum(0, dtype=torch.float32).to(down_weight.dtype) if wants_ddown_bias else None
    return dx, dup_weight, dup_bias, ddown_weight, ddown_bias
