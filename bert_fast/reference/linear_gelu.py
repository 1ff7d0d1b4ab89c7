"""The first half of BERT's feed-forward block: y = gelu(x W^T + b).

    forward     pre = x W^T + b                     [T, N]
                y   = gelu(pre)
    backward    dpre    = dy * gelu'(pre)
                dx      = dpre W                    [T, K]
                dweight = dpre^T x                  [N, K]
                dbias   = sum over rows of dpre     [N]

Saved for backward: x and pre. Sources: Vaswani et al. 2017 (arXiv:1706.03762), section 3.3; Hendrycks and Gimpel 2016
(arXiv:1606.08415).
"""

from torch import Tensor

from bert_fast.reference.activations import activation_bwd, activation_fwd
from bert_fast.reference.linear import linear_bwd, linear_fwd
from bert_fast.reference.precision import wide

__all__ = ["linear_gelu_bwd", "linear_gelu_fwd"]

# torch's names of the two GELUs -> the config's
_HIDDEN_ACT = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}


def linear_gelu_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    """y = gelu(x W^T + b).

    x (Tensor [T, K]); weight (Tensor [N, K]); bias (Tensor [N] or None).
    approximate: "none" (erf, BERT's default) or "tanh".
    Returns: y (Tensor [T, N], dtype of x); pre (Tensor [T, N], dtype of x), the pre-activation, saved for backward.
    """
    pre = linear_fwd(x, weight, bias)
    return activation_fwd(pre, _HIDDEN_ACT[approximate]), pre


def linear_gelu_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, pre: Tensor, approximate: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `linear_gelu_fwd`.

    dy (Tensor [T, N]); x, weight, pre as given to and returned by the forward.
    Returns: dx (Tensor [T, K]); dweight (Tensor [N, K]); dbias (Tensor [N]), to be dropped where there was no bias.
    """
    dpre = activation_bwd(wide(dy), wide(pre), _HIDDEN_ACT[approximate])
    dx, dweight, dbias = linear_bwd(dpre, wide(x), wide(weight))
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)
