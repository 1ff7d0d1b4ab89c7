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

from collections.abc import Set

from torch import Tensor

from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.reference.linear import Linear
from bert_fast.reference.mlp import UP, Mlp
from bert_fast.triton._gemm import narrowed, product, product_activation, product_derivative
from bert_fast.triton.bias_gelu import bias_gelu_fwd
from bert_fast.triton.linear import linear_bwd, weight_gradient


def mlp_fwd(a: Mlp) -> tuple[Tensor, Tensor | None]:
    """(y, pre), as `reference.mlp`, contiguous."""
    act, pre = product_activation(a.x, narrowed(a.up_weight, a.x).t(), a.up_bias, a.hidden_act, a.save_pre)
    return product(act, narrowed(a.down_weight, a.x).t(), a.down_bias), pre


def mlp_bwd(a: Mlp, dy: Tensor, pre: Tensor | None, wants: Set[str], onto: Tensor | None = None) -> dict[str, Tensor]:
    """Gradients by name, as `reference.mlp`."""
    made: dict[str, Tensor] = {}
    act = dpre = None
    wants_dpre = not wants.isdisjoint(UP)
    if pre is None and (wants_dpre or "down_weight" in wants):
        pre = product(a.x, narrowed(a.up_weight, dy).t(), a.up_bias)
    if wants_dpre:
        down, wants_act = narrowed(a.down_weight, dy), "down_weight" in wants
        sums_dtype = a.up_weight.dtype if "up_bias" in wants else None
        dpre, act, dup_bias = product_derivative(dy, down, pre, a.hidden_act, wants_act, sums_dtype)
        if dup_bias is not None:
            made["up_bias"] = dup_bias
    elif "down_weight" in wants:
        act = bias_gelu_fwd(BiasGelu(pre, None, a.hidden_act))
    if "down_weight" in wants:
        made["down_weight"] = weight_gradient(dy, act, a.down_weight)
        del act
    if "down_bias" in wants:
        made["down_bias"] = dy.sum(0, dtype=a.down_weight.dtype)
    if dpre is not None:  # last: dy may be what the gradient of x is added onto
        of_up = {UP[name] for name in wants & UP.keys()} - {"bias"}
        up = linear_bwd(Linear(a.x, a.up_weight, None), dpre, of_up, onto)
        made |= {name: up[of_linear] for name, of_linear in UP.items() if of_linear in up}
    return made
