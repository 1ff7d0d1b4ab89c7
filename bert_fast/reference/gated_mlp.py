"""The feed-forward block with a gated linear unit: SwiGLU (silu), GeGLU (gelu), ReGLU (relu).

    forward     gate = x Wg^T + bg,   up = x Wu^T + bu                  [T, I]
                h    = m * act(gate) * up       m = keep * scale, the mask of reference/dropout.py; 1 without dropout
                y    = h Wd^T + bd                                      [T, N]
    backward    dh    = m * (dy Wd)                                     [T, I]
                dgate = dh * up * act'(gate),   dup = dh * act(gate)    [T, I]
                dx    = dgate Wg + dup Wu                               [T, H]
                dWg   = dgate^T x,   dWu = dup^T x                      [I, H]      dbg, dbu: their sums over rows  [I]
                dWd   = dy^T h                                          [N, I]      dbd = sum over rows of dy       [N]

gate and up stand side by side in the rows of one tensor, pre = [gate | up], which is saved for backward beside x unless
it is to be computed again. h is never saved: it is a function of pre.
Source: Shazeer 2020 (arXiv:2002.05202), section 2.
"""

from collections.abc import Set
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.activations import activation_bwd, activation_fwd
from bert_fast.reference.dropout import dropout_bwd, dropout_fwd
from bert_fast.reference.linear import Linear, linear_bwd, linear_fwd
from bert_fast.reference.precision import wide


class GatedMlp(NamedTuple):
    """The arguments; parameters have the dtype of x or, beside half precision, fp32. Any strides.

    seed, coords: None where nothing is dropped.
    """

    x: Annotated[Tensor, "x T H"]
    gate_weight: Annotated[Tensor, "p I H"]
    gate_bias: Annotated[Tensor | None, "p I"]
    up_weight: Annotated[Tensor, "p I H"]
    up_bias: Annotated[Tensor | None, "p I"]  # None as gate_bias is
    down_weight: Annotated[Tensor, "p N I"]
    down_bias: Annotated[Tensor | None, "p N"]
    hidden_act: str  # a name of `activations.ACTIVATIONS`
    dropout_p: float
    seed: Annotated[Tensor | None, "int64 1"]
    coords: Annotated[Tensor | None, "int32 T 2"]
    site: int
    save_pre: bool  # whether [gate | up] is returned


# What has a gradient through gate and up; "weight" and "bias" are those of the two, one below the other.
OF_PRE = frozenset({"x", "weight", "bias"})


def gated_mlp_fwd(a: GatedMlp) -> tuple[Tensor, Tensor | None]:
    """y (Tensor [T, N], dtype of x); pre (Tensor [T, 2I], dtype of x) = [gate | up], or None where not saved."""
    gate, up = _gate_and_up(a)
    h = dropout_fwd(activation_fwd(gate, a.hidden_act) * up, a.dropout_p, a.seed, a.coords, a.site)
    y = linear_fwd(Linear(h, a.down_weight, a.down_bias))
    return y.to(a.x.dtype), torch.cat([gate, up], 1).to(a.x.dtype) if a.save_pre else None


def gated_mlp_bwd(a: GatedMlp, dy: Tensor, pre: Tensor | None, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, those of "x", "weight", "bias", "down_weight" and "down_bias" that are wanted.

    weight (Tensor [2I, H]), bias (Tensor [2I]): those of gate and up, one below the other, dtype of gate_weight.
    dy (Tensor [T, N]); pre as returned by the forward, None: computed again from x where it is needed. a.x may be None
    where neither that nor "weight" needs it, gate_bias and up_bias where pre is given, a.down_bias always.
    """
    made = {}
    if "down_bias" in wants:
        made["down_bias"] = wide(dy).sum(0).to(a.down_weight.dtype)
    if not needs_pre(wants):
        return made
    gate, up = _gate_and_up(a) if pre is None else wide(pre).chunk(2, dim=1)
    act = activation_fwd(gate, a.hidden_act)
    if "down_weight" in wants:
        h = dropout_fwd(act * up, a.dropout_p, a.seed, a.coords, a.site)
        made["down_weight"] = (wide(dy).T @ h).to(a.down_weight.dtype)
    if not wants.isdisjoint(OF_PRE):
        dh = dropout_bwd(wide(dy) @ wide(a.down_weight), a.dropout_p, a.seed, a.coords, a.site)
        dpre = torch.cat([activation_bwd(dh * up, gate, a.hidden_act), dh * act], 1)
        both = Linear(a.x, torch.cat([a.gate_weight, a.up_weight]), None)
        made |= linear_bwd(both, dpre, wants & OF_PRE)
    if "x" in made:
        made["x"] = made["x"].to(dy.dtype)
    return made


def needs_pre(wants: Set[str]) -> bool:
    """Whether these gradients are made of gate and up."""
    return not wants <= {"down_bias"}


def _gate_and_up(a: GatedMlp) -> tuple[Tensor, Tensor]:
    """Two of [T, I], as wide as sums are."""
    x = wide(a.x)
    return linear_fwd(Linear(x, a.gate_weight, a.gate_bias)), linear_fwd(Linear(x, a.up_weight, a.up_bias))
