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

from collections.abc import Set
from typing import Annotated, NamedTuple

from torch import Tensor

from bert_fast.reference.activations import activation_bwd, activation_fwd
from bert_fast.reference.linear import Linear, linear_bwd, linear_fwd
from bert_fast.reference.precision import wide


class Mlp(NamedTuple):
    """The arguments; parameters have the dtype of x or, beside half precision, fp32. Any strides. N is H in BERT."""

    x: Annotated[Tensor, "x T H"]
    up_weight: Annotated[Tensor, "p I H"]
    up_bias: Annotated[Tensor | None, "p I"]
    down_weight: Annotated[Tensor, "p N I"]
    down_bias: Annotated[Tensor | None, "p N"]
    hidden_act: str  # a name of `activations.ACTIVATIONS`
    save_pre: bool  # whether the pre-activation is returned


# Of the first linear layer: the fields that are its own, by its names.
UP = {"x": "x", "up_weight": "weight", "up_bias": "bias"}
_DOWN = {"down_weight": "weight", "down_bias": "bias"}


def mlp_fwd(a: Mlp) -> tuple[Tensor, Tensor | None]:
    """y (Tensor [T, N], dtype of x); pre (Tensor [T, I], dtype of x), the pre-activation, or None where not saved."""
    pre = linear_fwd(Linear(wide(a.x), a.up_weight, a.up_bias))
    y = linear_fwd(Linear(activation_fwd(pre, a.hidden_act), a.down_weight, a.down_bias))
    return y.to(a.x.dtype), pre.to(a.x.dtype) if a.save_pre else None


def mlp_bwd(a: Mlp, dy: Tensor, pre: Tensor | None, wants: Set[str], onto: Tensor | None = None) -> dict[str, Tensor]:
    """Gradients by name, those that are wanted, of the shapes of their fields; each bias's of the dtype of its weight.

    dy (Tensor [T, N]); pre as returned by the forward, None: computed again from x where it is needed. a.x may be None
    where neither that nor the gradient of up_weight needs it, a.up_bias where pre is given, a.down_bias always.
    onto: as in `linear_bwd`; it may be dy itself.
    """
    wants_dpre = not wants.isdisjoint(UP)
    if pre is None and (wants_dpre or "down_weight" in wants):
        pre = linear_fwd(Linear(wide(a.x), a.up_weight, a.up_bias))
    act = None if pre is None else activation_fwd(wide(pre), a.hidden_act)
    of_down = {_DOWN[name] for name in wants & _DOWN.keys()} | ({"x"} if wants_dpre else set())
    down = linear_bwd(Linear(act, a.down_weight, None), wide(dy), of_down)  # type: ignore[arg-type]
    made = {name: down[of_linear] for name, of_linear in _DOWN.items() if of_linear in down}
    if wants_dpre:
        assert pre is not None
        dpre = activation_bwd(down["x"], wide(pre), a.hidden_act)
        up = linear_bwd(Linear(a.x, a.up_weight, None), dpre, {UP[name] for name in wants & UP.keys()})
        made |= {name: up[of_linear] for name, of_linear in UP.items() if of_linear in up}
    if "x" in made:
        dx = made["x"].to(dy.dtype)
        made["x"] = dx if onto is None else dx.add_(onto)
    return made
