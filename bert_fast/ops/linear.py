"""x W^T + b as a differentiable op, on the fastest matrix product of the device.

Registered as `bert_fast::linear_fwd` and `_bwd`. Gradients that nobody wants are not computed; they leave backward as
empty tensors, since an op cannot return None.
"""

from typing import Any

from torch import Tensor

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.ops._autocast import autocast_linear_operands, without_autocast
from bert_fast.ops._linear_checks import check_input, check_parameters
from bert_fast.ops._register import custom_op, without_none
from bert_fast.ops._signature import check_given

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """y = x W^T + b.

    x (Tensor [T, K], fp32/fp16/bf16/fp64): input, any strides.
    weight (Tensor [N, K]), bias (Tensor [N] or None, dtype of weight): dtype of x or, beside half precision, fp32: then
        cast to the dtype of x within the op, and their gradients are fp32.
    backend: "triton", "torch" or "reference"; None takes the first that can run the call.
    Returns: y (Tensor [T, N], dtype of x; autocast's dtype under autocast), contiguous.

    Raises:
        TypeError: dtypes differ or are none of these. ValueError: shapes do not fit or devices differ.
        BackendError: the forced back-end cannot run the call.

    Differentiable once. Deterministic; no device sync. Saves weight, and x where weight wants a gradient.
    Precision: sums in fp32 (fp64 for fp64), on CUDA in fp32 with TF32 as PyTorch is set.
    Autocast: x is cast; fp32 parameters are cast within the op, so that no half-precision copy of them is saved.
    """
    x, weight, bias = autocast_linear_operands(x, weight, bias)
    check_input("x", x)
    check_parameters("weight", weight, "bias", bias, x.shape[1], x)
    return _forward(x, weight, bias, requested(backend))


@custom_op("linear_fwd", tensors={"x": "x T K", "weight": "p N K", "bias": "p N"})
@without_autocast
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return resolve("linear", OpSpec.of(x), backend).linear_fwd(x, weight, bias)


@_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@custom_op(
    "linear_bwd",
    tensors={"dy": "x T N", "x": "x T K", "weight": "p N K"},
    check=lambda dy, x, weight, wants_dx, wants_dweight, *_: check_given("x", x, wants_dweight),
)
@without_autocast
def _backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, wants_dx: bool, wants_dweight: bool, wants_dbias: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    implementation = resolve("linear", OpSpec.of(dy), backend)
    return without_none(implementation.linear_bwd(dy, x, weight, wants_dx, wants_dweight, wants_dbias), dy)


@_backward.register_fake
def _(
    dy: Tensor, x: Tensor | None, weight: Tensor, wants_dx: bool, wants_dweight: bool, wants_dbias: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    dx = dy.new_empty((dy.shape[0], weight.shape[1])) if wants_dx else None
    dweight = weight.new_empty(weight.shape) if wants_dweight else None
    dbias = weight.new_empty(weight.shape[0]) if wants_dbias else None
    return without_none((dx, dweight, dbias), dy)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, ctx.backend = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


def _autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wants = ctx.needs_input_grad[:3]
    made = _backward(dy, x, weight, *wants, ctx.backend)
    return *(gradient if wanted else None for gradient, wanted in zip(made, wants, strict=True)), None


_forward.register_autograd(_autograd, setup_context=_setup_context)
