"""y = act(x + bias), elementwise over [T, N], bias one number per column; GELU first of all, or another activation.

    pre = x + bias
    y   = act(pre)

Backward: dx = dy * act'(pre); dbias = sum over rows of dx. Saved: x (and bias), so pre is computed again.
The functions and their sources are in `activations.py`.
"""

from torch import Tensor

from bert_fast.reference.activations import activation
from bert_fast.reference.precision import wide

__all__ = ["bias_gelu_bwd", "bias_gelu_fwd"]


def bias_gelu_fwd(x: Tensor, bias: Tensor | None, hidden_act: str) -> Tensor:
    """act(x + bias).

    x (Tensor [T, N]); bias (Tensor [N] or None); hidden_act: a name of `activations.ACTIVATIONS`.
    Returns: y (Tensor [T, N], dtype of x).
    """
    return activation(hidden_act).forward(_pre_activation(x, bias)).to(x.dtype)


def bias_gelu_bwd(dy: Tensor, x: Tensor, bias: Tensor | None, hidden_act: str) -> tuple[Tensor, Tensor | None]:
    """Gradients of `bias_gelu_fwd`: dx (Tensor [T, N], dtype of x); dbias (Tensor [N], dtype of bias; None without)."""
    dx = wide(dy) * activation(hidden_act).derivative(_pre_activation(x, bias))
    return dx.to(x.dtype), None if bias is None else dx.sum(dim=0).to(bias.dtype)


def _pre_activation(x: Tensor, bias: Tensor | None) -> Tensor:
    return wide(x) if bias is None else wide(x) + wide(bias)
