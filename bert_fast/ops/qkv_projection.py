"""Query, key and value of self-attention from one input, as one differentiable op."""

from typing import Any

from torch import Tensor

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.checks import check_floating, check_like, check_shape
from bert_fast.ops._autocast import autocast_operands
from bert_fast.ops._register import custom_op

__all__ = ["qkv_projection"]


def qkv_projection(
    x: Tensor, wq: Tensor, bq: Tensor, wk: Tensor, bk: Tensor, wv: Tensor, bv: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v = x W^T + b for each of the three projections.

    x (Tensor [T, H], floating): input. wq, wk, wv (Tensor [N, H]), bq, bk, bv (Tensor [N]): N = A * D, dtype of x.
    Returns: q, k, v (Tensor [T, N] each, dtype of x; autocast's dtype under autocast).

    Raises:
        TypeError: dtypes differ or are not floating-point. ValueError: shapes do not fit or devices differ.
        BackendError: the forced back-end cannot run the call.

    Saves x and the weights.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2.
    """
    x, wq, bq, wk, bk, wv, bv = autocast_operands(x, wq, bq, wk, bk, wv, bv)
    check_shape("x", x, ("T", "H"))
    check_floating("x", x)
    for name, weight, bias in (("q", wq, bq), ("k", wk, bk), ("v", wv, bv)):
        check_like(f"w{name}", weight, ("N", x.shape[1]), "x", x)
        check_like(f"b{name}", bias, (weight.shape[0],), "x", x)
    return _forward(x, wq, bq, wk, bk, wv, bv, requested(backend))


@custom_op("qkv_projection_fwd")
def _forward(
    x: Tensor, wq: Tensor, bq: Tensor, wk: Tensor, bk: Tensor, wv: Tensor, bv: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return resolve("qkv_projection", OpSpec.of(x), backend).qkv_projection_fwd(x, wq, bq, wk, bk, wv, bv)


@_forward.register_fake
def _(
    x: Tensor, wq: Tensor, bq: Tensor, wk: Tensor, bk: Tensor, wv: Tensor, bv: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty((x.shape[0], w.shape[0])) for w in (wq, wk, wv))
    return q, k, v


@custom_op("qkv_projection_bwd")
def _backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return resolve("qkv_projection", OpSpec.of(x), backend).qkv_projection_bwd(dq, dk, dv, x, wq, wk, wv)


@_backward.register_fake
def _(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    weights = [(w.new_empty(w.shape), w.new_empty(w.shape[0])) for w in (wq, wk, wv)]
    return x.new_empty(x.shape), *weights[0], *weights[1], *weights[2]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, wq, _, wk, _, wv, _, ctx.backend = inputs
    ctx.save_for_backward(x, wq, wk, wv)


def _autograd(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    x, wq, wk, wv = ctx.saved_tensors
    dx, dwq, dbq, dwk, dbk, dwv, dbv = _backward(dq, dk, dv, x, wq, wk, wv, ctx.backend)
    return dx, dwq, dbq, dwk, dbk, dwv, dbv, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
