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

from collections.abc import Set
from typing import Annotated, NamedTuple

from torch import Tensor

from bert_fast.reference.activations import activation_bwd, activation_fwd
from bert_fast.reference.linear import Linear, linear_bwd, linear_fwd
from bert_fast.reference.precision import wide


class LinearGelu(NamedTuple):
    """The arguments; parameters have the dtype of x or, beside half precision, fp32. Any strides."""

    x: Annotated[Tensor, "x T K"]
    weight: Annotated[Tensor, "p N K"]
    bias: Annotated[Tensor | None, "p N"]
    hidden_act: str  # a name of `activations.ACTIVATIONS`
    save_pre: bool  # whether the pre-activation is returned

    @property
    def product(self) -> Linear:
        """The linear layer alone."""
        return Linear(self.x, self.weight, self.bias)


def linear_gelu_fwd(a: LinearGelu) -> tuple[Tensor, Tensor | None]:
    """y (Tensor [T, N], dtype of x), of pre before it is rounded; pre (the same), or None where it is not saved."""
    pre = linear_fwd(a.product._replace(x=wide(a.x)))
    return activation_fwd(pre, a.hidden_act).to(a.x.dtype), pre.to(a.x.dtype) if a.save_pre else None


def linear_gelu_bwd(a: LinearGelu, dy: Tensor, pre: Tensor | None, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, those that are wanted, of the shapes and dtypes of their fields.

    dy (Tensor [T, N]); pre as returned by the forward, None: computed again from x. a.x may be None where neither that
    nor the gradient of weight needs it, a.bias where pre is given.
    """
    if pre is None:
        pre = linear_fwd(a.product._replace(x=wide(a.x)))
    made = linear_bwd(a.product, activation_bwd(wide(dy), wide(pre), a.hidden_act), wants)
    return made | {"x": made["x"].to(dy.dtype)} if "x" in made else made
