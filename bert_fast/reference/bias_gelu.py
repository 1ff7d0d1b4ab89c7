"""y = act(x + bias), elementwise over [T, N], bias one number per column; GELU first of all, or another activation.

    pre = x + bias
    y   = act(pre)

Backward: dx = dy * act'(pre); dbias = sum over rows of dx. Saved: x (and bias), so pre is computed again.
The functions and their sources are in `activations.py`.
"""

from typing import Annotated, NamedTuple

from torch import Tensor

from bert_fast.reference.activations import activation
from bert_fast.reference.precision import wide


class BiasGelu(NamedTuple):
    """The arguments; bias has the dtype of x or, beside half precision, fp32. Any strides."""

    x: Annotated[Tensor, "x T N"]
    bias: Annotated[Tensor | None, "p N"]
    hidden_act: str  # a name of `activations.ACTIVATIONS`


def bias_gelu_fwd(a: BiasGelu) -> Tensor:
    """y (Tensor [T, N], dtype of x)."""
    return activation(a.hidden_act).forward(_pre_activation(a)).to(a.x.dtype)


def bias_gelu_bwd(a: BiasGelu, dy: Tensor) -> dict[str, Tensor]:
    """Gradients by name, of the shapes and dtypes of their fields; that of bias where there is one.

    dy (Tensor [T, N], dtype of x).
    """
    dx = wide(dy) * activation(a.hidden_act).derivative(_pre_activation(a))
    made = {"x": dx.to(a.x.dtype)}
    return made if a.bias is None else made | {"bias": dx.sum(dim=0).to(a.bias.dtype)}


def _pre_activation(a: BiasGelu) -> Tensor:
    return wide(a.x) if a.bias is None else wide(a.x) + wide(a.bias)
