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

from collections.abc import Set

from torch import Tensor

from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.reference.linear_gelu import LinearGelu
from bert_fast.triton._gemm import narrowed, product_activation, product_recomputed
from bert_fast.triton._products import settings
from bert_fast.triton._programs import by_programs
from bert_fast.triton.bias_gelu import bias_gelu_bwd
from bert_fast.triton.linear import linear_bwd


@by_programs(LinearGelu, {"x": "T_"}, settings=settings)
def linear_gelu_fwd(a: LinearGelu) -> tuple[Tensor, Tensor | None]:
    """(y, pre), as `reference.linear_gelu`, contiguous."""
    return product_activation(a.x, narrowed(a.weight, a.x).t(), a.bias, a.hidden_act, a.save_pre)


@by_programs(LinearGelu, {"x": "T_", "dy": "T_", "pre": "T_"}, "dy", "pre", "wants", settings=settings)
def linear_gelu_bwd(a: LinearGelu, dy: Tensor, pre: Tensor | None, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, as `reference.linear_gelu`."""
    sums_dtype = a.weight.dtype if "bias" in wants else None
    if pre is None:
        weight = narrowed(a.weight, dy).t()
        dpre, dbias = product_recomputed(a.x, weight, a.bias, dy, a.hidden_act, sums_dtype)
    else:
        # The kernel sums columns for the sake of a bias: one of zeros asks for the sums alone.
        zeros = pre.new_zeros(pre.shape[1], dtype=sums_dtype) if sums_dtype else None
        of_gelu = bias_gelu_bwd(BiasGelu(pre, zeros, a.hidden_act), dy)
        dpre, dbias = of_gelu["x"], of_gelu.get("bias")
    made = linear_bwd(a.product, dpre, wants - {"bias"})
    return made if dbias is None else made | {"bias": dbias}
