"""act(x W^T + b), GELU first of all, as one differentiable op: the first half of BERT's MLP, and its heads.

Registered as `bert_fast::linear_gelu_fwd` and `_bwd`; gradients that nobody wants are not computed.
"""

from typing import Any

import torch
from torch import Tensor

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.checks import check_flag
from bert_fast.ops._autocast import autocast_linear_operands, without_autocast
from bert_fast.ops._linear_checks import check_activation, check_input, check_parameters
from bert_fast.ops._register import custom_op, without_none
from bert_fast.ops._signature import check_given

__all__ = ["linear_activation", "linear_gelu"]

# torch's names of the two GELUs -> the config's
_HIDDEN_ACT = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}


def linear_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    hidden_act: str = "gelu",
    save_pre: bool = True,
    backend: str | None = None,
) -> Tensor:
    """y = act(x W^T + b).

    x (Tensor [T, K], fp32/fp16/bf16/fp64): input, any strides.
    weight (Tensor [N, K]), bias (Tensor [N] or None, dtype of weight): dtype of x or, beside half precision, fp32: then
        cast to the dtype of x within the op, and their gradients are fp32.
    hidden_act: a name that a configuration may give: "gelu" (erf), "gelu_new" or "gelu_pytorch_tanh" (two names of
        tanh-GELU), "relu", "silu" or "swish", "tanh".
    save_pre: whether backward finds the pre-activation saved, or computes it again (one more product).
    backend: "triton", "torch" or "reference"; None takes the first that can run the call.
    Returns: y (Tensor [T, N], dtype of x; autocast's dtype under autocast), contiguous.

    Raises:
        TypeError: dtypes differ or are none of these, hidden_act is no string, save_pre no bool.
        ValueError: shapes do not fit, devices differ, hidden_act is none of the names.
        BackendError: the forced back-end cannot run the call.

    Differentiable once. Deterministic; no device sync. Saves the parameters; x (T * K elements) where weight wants a
        gradient or pre is not saved; pre (T * N elements) where save_pre asks for it; without gradients nothing.
    Precision: sums in fp32 (fp64 for fp64); half precision rounds pre where it is saved, and y.
    Autocast: x is cast; fp32 parameters are cast within the op, so that no half-precision copy of them is saved.
    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415).
    """
    x, weight, bias = autocast_linear_operands(x, weight, bias)
    check_input("x", x)
    check_parameters("weight", weight, "bias", bias, x.shape[1], x)
    check_activation(hidden_act)
    check_flag("save_pre", save_pre)
    has_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return _forward(x, weight, bias, hidden_act, save_pre and has_gradient, requested(backend))[0]


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: str = "none",
    save_pre: bool = True,
    backend: str | None = None,
) -> Tensor:
    """y = gelu(x W^T + b), with GELU(z) = z * Phi(z) by erf unless tanh is asked for.

    approximate: "none" (erf, BERT's default) or "tanh". All else as for `linear_activation`, of which this is a case.
    """
    if approximate not in _HIDDEN_ACT:
        raise ValueError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    return linear_activation(x, weight, bias, hidden_act=_HIDDEN_ACT[approximate], save_pre=save_pre, backend=backend)


@custom_op("linear_gelu_fwd", tensors={"x": "x T K", "weight": "p N K", "bias": "p N"})
@without_autocast
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, hidden_act: str, save_pre: bool, backend: str
) -> tuple[Tensor, Tensor]:
    implementation = resolve("linear_gelu", OpSpec.of(x), backend)
    return without_none(implementation.linear_gelu_fwd(x, weight, bias, hidden_act, save_pre), x)


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, hidden_act: str, save_pre: bool, backend: str
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if save_pre else 0)


@custom_op(
    "linear_gelu_bwd",
    tensors={"dy": "x T N", "x": "x T K", "weight": "p N K", "bias": "p N", "pre": "x T N"},
    check=lambda dy, x, weight, bias, pre, hidden_act, wants_dx, wants_dweight, *_: check_given(
        "x", x, pre is None or wants_dweight
    ),
)
@without_autocast
def _backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor | None, pre: Tensor | None, hidden_act: str,
    wants_dx: bool, wants_dweight: bool, wants_dbias: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    implementation = resolve("linear_gelu", OpSpec.of(dy), backend)
    made = implementation.linear_gelu_bwd(
        dy, x, weight, bias, pre, hidden_act, wants_dx, wants_dweight, wants_dbias
    )  # fmt: skip
    return without_none(made, dy)


@_backward.register_fake
def _(
    dy: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor | None, pre: Tensor | None, hidden_act: str,
    wants_dx: bool, wants_dweight: bool, wants_dbias: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = dy.new_empty((dy.shape[0], weight.shape[1])) if wants_dx else None
    dweight = weight.new_empty(weight.shape) if wants_dweight else None
    dbias = weight.new_empty(weight.shape[0]) if wants_dbias else None
    return without_none((dx, dweight, dbias), dy)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, ctx.hidden_act, save_pre, ctx.backend = inputs
    _, pre = output
    ctx.mark_non_differentiable(pre)
    ctx.set_materialize_grads(False)
    saves_x = ctx.needs_input_grad[1] or not save_pre
    ctx.save_for_backward(x if saves_x else None, weight, None if save_pre else bias, pre if save_pre else None)


def _autograd(ctx: Any, dy: Tensor | None, _dpre: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    wants = ctx.needs_input_grad[:3]
    made = _backward(dy, *ctx.saved_tensors, ctx.hidden_act, *wants, ctx.backend)
    return *(gradient if wanted else None for gradient, wanted in zip(made, wants, strict=True)), None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
