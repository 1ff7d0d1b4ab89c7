"""A linear layer and an activation, GELU first of all: y = act(x W^T + b).

    forward     pre = x W^T + b                     [T, N]
                y   = act(pre)
    backward    dpre    = dy * act'(pre)
                dx      = dpre W                    [T, K]
                dweight = dpre^T x                  [N, K]
                dbias   = sum over rows of dpre     [N]

Saved for backward: x, and pre unless it is to be computed again. `activations.py` has the functions. Sources: Vaswani
et al. 2017 (arXiv:1706.03762), section 3.3; Hendrycks and Gimpel 2016 (arXiv:1606.08415).
"""

from torch import Tensor

from bert_fast.reference.activations import activation_bwd, activation_fwd
from bert_fast.reference.linear import linear_bwd, linear_fwd
from bert_fast.reference.precision import wide

__all__ = ["linear_gelu_bwd", "linear_gelu_fwd"]


def linear_gelu_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, hidden_act: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """y = act(x W^T + b).

    x (Tensor [T, K]); weight (Tensor [N, K]), bias (Tensor [N] or None): dtype of x, or fp32 beside half precision.
    hidden_act: a name of `activations.ACTIVATIONS`.
    Returns: y (Tensor [T, N], dtype of x), of the pre-activation before it is rounded; pre (Tensor [T, N], dtype of x),
        the pre-activation, where it is to be saved, else None.
    """
    pre = linear_fwd(wide(x), weight, bias)
    return activation_fwd(pre, hidden_act).to(x.dtype), pre.to(x.dtype) if save_pre else None


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
    """Gradients of `linear_gelu_fwd`, None for those that are not wanted.

    dy (Tensor [T, N]); weight, bias as given to the forward; pre as returned by it, None: computed again from x. x may
        be None where neither that nor dweight needs it.
    Returns: dx (Tensor [T, K], dtype of x); dweight (Tensor [N, K]), dbias (Tensor [N]), dtype of weight.
    """
    if pre is None:
        assert x is not None
        pre = linear_fwd(wide(x), weight, bias)
    dpre = activation_bwd(wide(dy), wide(pre), hidden_act)
    dx, dweight, dbias = linear_bwd(dpre, x, weight, wants_dx, wants_dweight, wants_dbias)
    return None if dx is None else dx.to(dy.dtype), dweight, dbias
