"""y = LayerNorm(x), forward and backward, on any back-end.

Registered as `bert_fast::layer_norm_fwd` and `_bwd` on [T, H]; autograd saves x, mean and rstd besides the weight.
"""

from typing import Any

import torch
from torch import Tensor

from bert_fast import backend as backends
from bert_fast.checks import check_dtype, check_number, check_same_device, check_shape, check_tensor
from bert_fast.ops._autocast import autocast_operands
from bert_fast.ops._register import custom_op

__all__ = ["layer_norm"]

_OP = "layer_norm"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@custom_op("layer_norm_fwd", tensors={"x": "x T H+", "weight": "p H", "bias": "p H"})
def _fwd(x: Tensor, weight: Tensor, bias: Tensor, eps: float, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    module = backends.resolve(_OP, backends.OpSpec.of(x, hidden_size=x.shape[1]), backend)
    y, mean, rstd = module.layer_norm_fwd(x, weight, bias, eps)
    # The fake implementation promises this layout; PyTorch's own operators would keep that of a transposed x.
    return y.contiguous(), mean, rstd


@_fwd.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    statistics_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean, rstd = (x.new_empty(x.shape[:1], dtype=statistics_dtype) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


@custom_op("layer_norm_bwd", tensors={"x": "x T H+", "dy": "x T H", "weight": "p H", "mean": "s T", "rstd": "s T"})
def _bwd(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    module = backends.resolve(_OP, backends.OpSpec.of(x, hidden_size=x.shape[1]), backend)
    dx, dweight, dbias = module.layer_norm_bwd(dy, x, weight, mean, rstd)
    return dx.contiguous(), dweight, dbias


@_bwd.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, _, ctx.backend = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, mean, rstd)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    x, weight, mean, rstd = ctx.saved_tensors
    return *_bwd(dy, x, weight, mean, rstd, ctx.backend), None, None


_fwd.register_autograd(_backward, setup_context=_setup_context)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-12, backend: str | None = None) -> Tensor:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension.

    x (Tensor [..., H], fp32/fp16/bf16/fp64): any number of leading dimensions, any strides; rows are copied together
        first where the leading dimensions cannot be seen as one. H up to 8,192 on the Triton back-end.
    weight, bias (Tensor [H]): one dtype, that of x or fp32.
    eps: added to the variance as given.
    backend: "triton", "torch" or "reference"; None takes the first that can run the call.
    Returns: y (Tensor, shape and dtype of x), contiguous, never an alias of an input.
    Raises: TypeError, ValueError naming the argument; BackendError if the named back-end cannot run the call.
    Precision: statistics and arithmetic in fp32 (fp64 for fp64), rounded once. Differentiable once, in x, weight and
        bias. Deterministic: two-stage sums, no atomics. No device sync.
    Autocast: x is cast to the autocast dtype (fp64 stays) and so is y, so the residual stream stays in it; weight and
        bias keep their dtype.
    Saves x, mean and rstd: T * H elements and 2 * T fp32 numbers. Nothing under `torch.no_grad`.
    Source: Ba et al. 2016 (arXiv:1607.06450), section 3.
    """
    (x,) = autocast_operands(x)
    _check(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    return _fwd(rows, weight, bias, check_number("eps", eps), backends.requested(backend))[0].view(x.shape)


def _check(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    check_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected shape [..., H] with at least one column, got {list(x.shape)}")
    check_dtype("x", x, _DTYPES)
    check_shape("weight", weight, (x.shape[-1],))
    check_dtype("weight", weight, (x.dtype,) if x.dtype in (torch.float32, torch.float64) else (x.dtype, torch.float32))
    check_same_device("weight", weight, "x", x)
    check_shape("bias", bias, (x.shape[-1],))
    check_dtype("bias", bias, (weight.dtype,))
    check_same_device("bias", bias, "x", x)
