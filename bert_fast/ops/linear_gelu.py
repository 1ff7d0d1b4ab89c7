"""gelu(x W^T + b): the first half of BERT's MLP as one differentiable op."""

from typing import Any

from torch import Tensor

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.checks import check_floating, check_like, check_shape
from bert_fast.ops._autocast import autocast_operands
from bert_fast.ops._register import custom_op

__all__ = ["linear_gelu"]


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, approximate: str = "none", backend: str | None = None
) -> Tensor:
    """y = gelu(x W^T + b), with GELU(z) = z * Phi(z) by erf unless tanh is asked for.

    x (Tensor [T, K], floating): input. weight (Tensor [N, K]); bias (Tensor [N] or None); dtype of x.
    approximate: "none" (erf, BERT's default) or "tanh".
    Returns: y (Tensor [T, N], dtype of x; autocast's dtype under autocast).

    Raises:
        TypeError: dtypes differ or are not floating-point.
        ValueError: shapes do not fit, devices differ, approximate is neither.
        BackendError: the forced back-end cannot run the call.

    Saves x, weight and the pre-activation (T * N elements).
    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415).
    """
    x, weight, bias = autocast_operands(x, weight, bias)
    check_shape("x", x, ("T", "K"))
    check_floating("x", x)
    check_like("weight", weight, ("N", x.shape[1]), "x", x)
    if bias is not None:
        check_like("bias", bias, (weight.shape[0],), "x", x)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    return _forward(x, weight, bias, approximate, requested(backend))[0]


@custom_op("linear_gelu_fwd")
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, backend: str) -> tuple[Tensor, Tensor]:
    return resolve("linear_gelu", OpSpec.of(x), backend).linear_gelu_fwd(x, weight, bias, approximate)


@_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, backend: str) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


@custom_op("linear_gelu_bwd")
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, pre: Tensor, approximate: str, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return resolve("linear_gelu", OpSpec.of(x), backend).linear_gelu_bwd(dy, x, weight, pre, approximate)


@_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, pre: Tensor, approximate: str, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, ctx.approximate, ctx.backend = inputs
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dy: Tensor | None, _dpre: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    x, weight, pre = ctx.saved_tensors
    dx, dweight, dbias = _backward(dy, x, weight, pre, ctx.approximate, ctx.backend)
    return dx, dweight, dbias if ctx.has_bias else None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
