"""x W^T + b as a differentiable op, on the fastest matrix product of the device."""

from typing import Any

from torch import Tensor

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.checks import check_floating, check_like, check_shape
from bert_fast.ops._autocast import autocast_operands
from bert_fast.ops._register import custom_op

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """y = x W^T + b.

    x (Tensor [T, K], floating): input. weight (Tensor [N, K]); bias (Tensor [N] or None); dtype of x.
    Returns: y (Tensor [T, N], dtype of x; autocast's dtype under autocast).

    Raises:
        TypeError: dtypes differ or are not floating-point. ValueError: shapes do not fit or devices differ.
        BackendError: the forced back-end cannot run the call.

    Saves x and weight.
    """
    x, weight, bias = autocast_operands(x, weight, bias)
    check_shape("x", x, ("T", "K"))
    check_floating("x", x)
    check_like("weight", weight, ("N", x.shape[1]), "x", x)
    if bias is not None:
        check_like("bias", bias, (weight.shape[0],), "x", x)
    return _forward(x, weight, bias, requested(backend))


@custom_op("linear_fwd")
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return resolve("linear", OpSpec.of(x), backend).linear_fwd(x, weight, bias)


@_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@custom_op("linear_bwd")
def _backward(dy: Tensor, x: Tensor, weight: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    return resolve("linear", OpSpec.of(x), backend).linear_bwd(dy, x, weight)


@_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, ctx.backend = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, dweight, dbias = _backward(dy, x, weight, ctx.backend)
    return dx, dweight, dbias if ctx.has_bias else None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
