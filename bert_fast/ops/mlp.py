"""act(x Wu^T + bu) Wd^T + bd, BERT's feed-forward block, as one differentiable op.

Registered as `bert_fast::mlp_fwd` and `_bwd`; gradients that nobody wants are not computed. Why one op and not two:
the activation between the products is never saved (docs/decisions/0009-mlp.md).
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

__all__ = ["mlp"]


def mlp(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None = None,
    *,
    hidden_act: str = "gelu",
    save_pre: bool = True,
    backend: str | None = None,
) -> Tensor:
    """y = act(x Wu^T + bu) Wd^T + bd.

    x (Tensor [T, H], fp32/fp16/bf16/fp64): input, any strides.
    up_weight (Tensor [I, H]), up_bias (Tensor [I] or None, dtype of up_weight), down_weight (Tensor [N, I]; N is H in
        BERT), down_bias (Tensor [N] or None, dtype of down_weight): dtype of x or, beside half precision, fp32: then
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

    Differentiable once. Deterministic; no device sync. Saves the parameters; x (T * H elements) where up_weight wants a
        gradient or pre is not saved; pre (T * I elements) where save_pre asks for it; never the activation; without
        gradients nothing. On the CPU nothing else of more than a chunk of tokens is made between the products.
    Precision: sums in fp32 (fp64 for fp64); half precision rounds pre where it is saved, the activation, and y.
    Autocast: x is cast; fp32 parameters are cast within the op, so that no half-precision copy of them is saved.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.3.
    """
    x, up_weight, up_bias, down_weight, down_bias = autocast_linear_operands(
        x, up_weight, up_bias, down_weight, down_bias
    )
    check_input("x", x)
    check_parameters("up_weight", up_weight, "up_bias", up_bias, x.shape[1], x, "I")
    check_parameters("down_weight", down_weight, "down_bias", down_bias, up_weight.shape[0], x)
    check_activation(hidden_act)
    check_flag("save_pre", save_pre)
    tensors = (x, up_weight, up_bias, down_weight)  # those whose gradients need pre
    saves_pre = save_pre and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return _forward(x, up_weight, up_bias, down_weight, down_bias, hidden_act, saves_pre, requested(backend))[0]


@custom_op(
    "mlp_fwd",
    tensors={"x": "x T H", "up_weight": "p I H", "up_bias": "p I", "down_weight": "p N I", "down_bias": "p N"},
)
@without_autocast
def _forward(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None,
    hidden_act: str, save_pre: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    implementation = resolve("mlp", OpSpec.of(x), backend)
    return without_none(
        implementation.mlp_fwd(x, up_weight, up_bias, down_weight, down_bias, hidden_act, save_pre), x
    )  # fmt: skip


@_forward.register_fake
def _(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None,
    hidden_act: str, save_pre: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pre = x.new_empty((x.shape[0], up_weight.shape[0]) if save_pre else 0)
    return x.new_empty((x.shape[0], down_weight.shape[0])), pre


@custom_op(
    "mlp_bwd",
    tensors={
        "dy": "x T N", "x": "x T H", "pre": "x T I", "up_weight": "p I H", "up_bias": "p I", "down_weight": "p N I",
    },
    check=lambda dy, x, pre, *rest: check_given("x", x, rest[5] or (pre is None and any(rest[4:8]))),
)  # fmt: skip
@without_autocast
def _backward(
    dy: Tensor, x: Tensor | None, pre: Tensor | None, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor,
    hidden_act: str, wants_dx: bool, wants_dup_weight: bool, wants_dup_bias: bool, wants_ddown_weight: bool,
    wants_ddown_bias: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    made = resolve("mlp", OpSpec.of(dy), backend).mlp_bwd(
        dy, x, pre, up_weight, up_bias, down_weight, hidden_act, wants_dx, wants_dup_weight, wants_dup_bias,
        wants_ddown_weight, wants_ddown_bias,
    )  # fmt: skip
    return without_none(made, dy)


@_backward.register_fake
def _(
    dy: Tensor, x: Tensor | None, pre: Tensor | None, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor,
    hidden_act: str, wants_dx: bool, wants_dup_weight: bool, wants_dup_bias: bool, wants_ddown_weight: bool,
    wants_ddown_bias: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    made = (
        dy.new_empty((dy.shape[0], up_weight.shape[1])) if wants_dx else None,
        up_weight.new_empty(up_weight.shape) if wants_dup_weight else None,
        up_weight.new_empty(up_weight.shape[0]) if wants_dup_bias else None,
        down_weight.new_empty(down_weight.shape) if wants_ddown_weight else None,
        down_weight.new_empty(down_weight.shape[0]) if wants_ddown_bias else None,
    )
    return without_none(made, dy)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, up_weight, up_bias, down_weight, _, ctx.hidden_act, save_pre, ctx.backend = inputs
    _, pre = output
    ctx.mark_non_differentiable(pre)
    ctx.set_materialize_grads(False)
    needs_pre = any(ctx.needs_input_grad[:4])
    saves_x = ctx.needs_input_grad[1] or (needs_pre and not save_pre)
    ctx.save_for_backward(
        x if saves_x else None, pre if save_pre else None, up_weight, None if save_pre else up_bias, down_weight
    )


def _autograd(ctx: Any, dy: Tensor | None, _dpre: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 8
    wants = ctx.needs_input_grad[:5]
    made = _backward(dy, *ctx.saved_tensors, ctx.hidden_act, *wants, ctx.backend)
    return *(gradient if wanted else None for gradient, wanted in zip(made, wants, strict=True)), None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
