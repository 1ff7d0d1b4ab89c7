"""(dropout(act(x Wg^T + bg) * (x Wu^T + bu))) Wd^T + bd, a feed-forward block with a gate, as one differentiable op.

Registered as `bert_fast::gated_mlp_fwd` and `_bwd`. The weights of gate and up come in as they are; a back-end takes
them for one matrix where they are neighbours in memory (`bert_fast/storage.py`). Backward makes one gradient of both
weights and one of both biases, whose halves become those of the two. Why one op: docs/decisions/0009-mlp.md, which
holds here as well.
"""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from bert_fast.backend import requested
from bert_fast.checks import check_flag, is_alike
from bert_fast.ops._autocast import autocast_linear_operands
from bert_fast.ops._define import define
from bert_fast.ops._linear_checks import check_activation, check_input, check_parameters
from bert_fast.ops._signature import check_given
from bert_fast.ops.dropout import check_dropout_state
from bert_fast.reference.dropout import dropout_threshold
from bert_fast.reference.gated_mlp import GatedMlp, needs_pre


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None = None,
    *,
    hidden_act: str = "silu",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    coords: Tensor | None = None,
    site: int = 0,
    save_pre: bool = True,
    backend: str | None = None,
) -> Tensor:
    """y = dropout(act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd: SwiGLU with "silu", GeGLU with "gelu".

    Args:
        x (Tensor [T, H], fp32/fp16/bf16/fp64): input, any strides.
        gate_weight (Tensor [I, H]): Wg. All parameters have the dtype of x or, beside half precision, fp32: then cast
            to the dtype of x within the op, and their gradients are fp32.
        up_weight (Tensor [I, H], dtype of gate_weight): Wu.
        gate_bias (Tensor [I], dtype of gate_weight): bg; None together with up_bias.
        up_bias (Tensor [I], dtype of gate_weight): bu.
        down_weight (Tensor [N, I]): Wd; N is H in an encoder.
        down_bias (Tensor [N] or None, dtype of down_weight): bd.
        hidden_act: a name that a configuration may give: "gelu" (erf), "gelu_new" or "gelu_pytorch_tanh" (two names of
            tanh-GELU), "relu", "silu" or "swish", "tanh".
        dropout_p: probability of dropping an element of act(gate) * up, rounded to a multiple of 2**-16; 0 in
            evaluation.
        seed (Tensor [1], int64): of this forward pass, see `draw_seed`. Needed when dropout_p > 0. It is read on the
            device, without a sync.
        coords (Tensor [T, 2], int32): every token's (row, position) in the original batch. Needed when dropout_p > 0.
        site: of the call, see `dropout_site`. Seed, site and coords name the mask (`reference/dropout.py`).
        save_pre: whether backward finds gate and up saved, or computes them again (one or two more products).
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor [T, N], dtype of x; autocast's dtype under autocast), contiguous.

    Raises:
        TypeError: dtypes differ or are none of these, hidden_act is no string, save_pre no bool.
        ValueError: shapes do not fit, devices differ, one of two biases is None, hidden_act is none of the names,
            dropout_p is no probability or lacks seed or coords.
        BackendError: the forced back-end cannot run the call.

    Differentiable once. Deterministic. Saves the parameters; x (T * H elements) where gate_weight or up_weight wants a
        gradient or gate and up are not saved; gate and up, side by side in one tensor (2 * T * I elements), where
        save_pre asks for it; never their product; seed and coords, never a mask; without gradients nothing. On the CPU
        nothing else of more than a chunk of tokens is made between the products.
    Where the weights (biases) of gate and up are neighbours in memory, their product is one and nothing is copied; else
        there are two. Their gradients always are neighbours, so `.grad` of one keeps the memory of both.
    Precision: sums in fp32 (fp64 for fp64); half precision rounds gate and up, the product of the two, and y.
    Autocast: x is cast; fp32 parameters are cast within the op, so that no half-precision copy of them is saved.
    Source: Shazeer 2020 (arXiv:2002.05202), section 2.

    Example:
        >>> x, gate, up, down = torch.randn(5, 8), torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12)
        >>> y = ops.gated_mlp(x, gate, None, up, None, down)
        >>> torch.allclose(y, (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T, atol=1e-3)
        True
    """
    x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias = autocast_linear_operands(
        x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias
    )
    check_input("x", x)
    check_parameters("gate_weight", gate_weight, "gate_bias", gate_bias, x.shape[1], x, "I")
    if not (is_alike(up_weight, gate_weight) and is_alike(up_bias, gate_bias)):
        _refuse(up_weight, up_bias, gate_weight, gate_bias, x)
    check_parameters("down_weight", down_weight, "down_bias", down_bias, gate_weight.shape[0], x)
    check_activation(hidden_act)
    check_flag("save_pre", save_pre)
    check_dropout_state(dropout_p, seed, coords, x, site, ("coords", "x"))
    if dropout_threshold(dropout_p) == 0:  # p below 2**-17 drops nothing
        dropout_p, seed, coords = 0.0, None, None  # nothing to replay, nothing to save
    # Those whose gradients need gate and up.
    tensors = (x, gate_weight, gate_bias, up_weight, up_bias, down_weight)
    saves_pre = save_pre and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return _op(
        x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, hidden_act, float(dropout_p), seed,
        coords, int(site), saves_pre, requested(backend),
    )[0]  # fmt: skip


def _refuse(weight: Any, bias: Any, gate_weight: Tensor, gate_bias: Tensor | None, x: Tensor) -> None:
    """Raises with what is wrong with the parameters of up."""
    _check_biases(gate_bias, bias)
    check_parameters("up_weight", weight, "up_bias", bias, x.shape[1], x, gate_weight.shape[0])
    wanted, got = (str(t.dtype).removeprefix("torch.") for t in (gate_weight, weight))
    raise TypeError(f"up_weight: expected dtype {wanted} (that of gate_weight), got {got}")


def _check_biases(gate_bias: Any, up_bias: Any) -> None:
    if (up_bias is None) != (gate_bias is None):
        wanted, got = ("None", "a Tensor") if gate_bias is None else ("a Tensor", "None")
        raise ValueError(f"up_bias: expected {wanted} as gate_bias is (both biases or none), got {got}")


def _needless(a: GatedMlp, wants: Set[str]) -> tuple[str, ...]:
    if a.save_pre:
        return ("gate_bias", "up_bias") if "weight" in wants else ("gate_bias", "up_bias", "x")
    return ("pre",) if needs_pre(wants) else ("pre", "x")  # pre is an empty tensor then


def _check_backward(a: GatedMlp, pre: Tensor | None, wants: Set[str]) -> None:
    check_given("x", a.x, "weight" in wants or (pre is None and needs_pre(wants)))


_op = define(
    "gated_mlp",
    GatedMlp,
    outputs={"y": "x T N", "pre": "x T 2I"},
    makes={"pre": lambda a: a.save_pre},
    backward="dy x? pre? gate_weight gate_bias? up_weight up_bias? down_weight hidden_act dropout_p seed coords site",
    gradients="x? weight? bias? down_weight? down_bias?",
    joined={"weight": ("gate_weight", "up_weight"), "bias": ("gate_bias", "up_bias")},
    needless=_needless,
    check=lambda a: _check_biases(a.gate_bias, a.up_bias),
    check_backward=_check_backward,
)
