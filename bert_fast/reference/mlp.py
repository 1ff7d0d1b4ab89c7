"""BERT's feed-forward block: two linear layers and the activation between them.

    forward     pre = x Wu^T + bu                   [T, I]
                act = act(pre)
                y   = act Wd^T + bd                 [T, H]
    backward    dpre = (dy Wd) * act'(pre)          [T, I]
                dx   = dpre Wu                      [T, H]
                dWu  = dpre^T x                     [I, H]      dbu = sum over rows of dpre     [I]
                dWd  = dy^T act                     [H, I]      dbd = sum over rows of dy       [H]

Saved for backward: x, and pre unless it is to be computed again. act is never saved: it is a function of pre, and
backward reads pre for act' anyway. Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.3.
"""

from torch import Tensor

from bert_fast.reference.activations import activation_bwd, activation_fwd
from bert_fast.reference.linear import linear_bwd, linear_fwd
from bert_fast.reference.precision import wide

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
    """y = act(x Wu^T + bu) Wd^T + bd.

    x (Tensor [T, H]); up_weight (Tensor [I, H]), up_bias (Tensor [I] or None), down_weight (Tensor [N, I]), down_bias
        (Tensor [N] or None): dtype of x, or fp32 beside half precision; N is H in BERT.
    hidden_act: a name of `activations.ACTIVATIONS`.
    Returns: y (Tensor [T, N], dtype of x); pre (Tensor [T, I], dtype of x), the pre-activation, where it is to be
        saved, else None.
    """
    pre = linear_fwd(wide(x), up_weight, up_bias)
    y = linear_fwd(activation_fwd(pre, hidden_act), down_weight, down_bias)
    return y.to(x.dtype), pre.to(x.dtype) if save_pre else None


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
    """Gradients of `mlp_fwd`, None for those that are not wanted.

    dy (Tensor [T, N]); the parameters as given to the forward; pre as returned by it, None: computed again from x where
        it is needed. x may be None where neither that nor dup_weight needs it.
    Returns: dx (Tensor [T, H], dtype of x); dup_weight [I, H], dup_bias [I], ddown_weight [N, I], ddown_bias [N], each
        of the dtype of its weight.
    """
    dx = dup_weight = dup_bias = ddown_weight = None
    wants_dpre = wants_dx or wants_dup_weight or wants_dup_bias
    if pre is None and (wants_dpre or wants_ddown_weight):
        assert x is not None
        pre = linear_fwd(wide(x), up_weight, up_bias)
    act = None if pre is None else activation_fwd(wide(pre), hidden_act)
    dact, ddown_weight, ddown_bias = linear_bwd(
        wide(dy), act, down_weight, wants_dpre, wants_ddown_weight, wants_ddown_bias
    )
    if wants_dpre:
        assert dact is not None and pre is not None
        dpre = activation_bwd(dact, wide(pre), hidden_act)
        dx, dup_weight, dup_bias = linear_bwd(dpre, x, up_weight, wants_dx, wants_dup_weight, wants_dup_bias)
    return None if dx is None else dx.to(dy.dtype), dup_weight, dup_bias, ddown_weight, ddown_bias
