"""x W^T + b with 8-bit products, for inference on a CPU.

Registered as `bert_fast::linear_int8`, without a backward.
"""

from typing import Any

import torch
from torch import Tensor

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.checks import check_dtype, check_same_device, check_shape
from bert_fast.errors import DerivativeError
from bert_fast.ops._register import custom_op
from bert_fast.ops._signature import lines_of
from bert_fast.reference import linear_int8 as _reference
from bert_fast.reference.linear_int8 import COLUMNS, DEPTH, MAX_FEATURES, STEPS, LinearInt8
from bert_fast.reference.linear_int8 import QuantizedWeight as QuantizedWeight


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Rounds the weight of a linear layer to 8 bits, with one scale per row: w = scale * round(w / scale).

    Args:
        weight (Tensor [N, K], fp32; K at most 65,536): its gradient does not reach the result.

    Returns:
        (packed, scale, sums), for `linear_int8`: the rounded weight in the layout of its kernels (Tensor
        [ceil(N / 16), 16 ceil(K / 64), 64], int8), the scales (Tensor [N], fp32: max |w| / 127) and the sums of the
        rounded rows (Tensor [N], int32). All are new, and do not follow weight.

    Raises:
        TypeError, ValueError: weight is of another shape or dtype.

    A row of zeros has the scale 0; one with NaN or an infinity has the scale NaN, and so gives NaN. No device sync.

    Example:
        >>> ops.quantize_weight(torch.tensor([[127.0, -63.5], [0.5, 1.0]])).scale * 127
        tensor([127.,   1.])
    """
    check_shape("weight", weight, ("N", "K"))
    check_dtype("weight", weight, (torch.float32,))
    _check_length("weight", weight.shape[1])
    with torch.no_grad():
        return _reference.quantize_weight(weight)


def linear_int8(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """y = x W^T + b with x rounded to 8 bits, row by row, and W rounded before: sums of products are exact integers.

    Args:
        x (Tensor [T, K], fp32, on a CPU; K at most 65,536): every row has a scale and a zero point of its own, from
            its least and greatest value.
        weight: of `quantize_weight`, for a weight [N, K].
        bias (Tensor [N] or None, fp32): added to every row.
        backend: "torch" or "reference"; None takes the first.

    Returns:
        y (Tensor [T, N], fp32), contiguous; NaN in the rows in which x has NaN or an infinity.

    Raises:
        TypeError, ValueError: arguments do not fit.
        BackendError: tensors are not on a CPU.
        DerivativeError: a gradient is recorded, which rounding has not.

    A row of y depends on that row of x alone; its bits are the same in any batch, for any number of threads, under any
        instruction set and on both back-ends. Autocast casts nothing here.
    Source: Jacob et al. 2017 (arXiv:1712.05877), section 2.

    Example:
        >>> weight = ops.quantize_weight(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> ops.linear_int8(torch.tensor([[255.0, 0.0]]), weight)
        tensor([[255.,   0.]])
    """
    check_shape("x", x, ("T", "K"))
    check_dtype("x", x, (torch.float32,))
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(f"weight: expected a QuantizedWeight (of ops.quantize_weight), got {type(weight).__name__}")
    _check(LinearInt8(x, *weight, bias))
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise DerivativeError(
                f"{name}: expected a Tensor that requires no gradient, got one that does: int8 products have none; "
                "call them within torch.inference_mode() or torch.no_grad()"
            )
    return _op(x, *weight, bias, requested(backend))


def _check_length(name: str, k: int) -> None:
    if k > MAX_FEATURES:
        raise ValueError(f"{name}: expected at most {MAX_FEATURES} columns, whose sums fit into 32 bits, got {k}")


def _check(a: LinearInt8) -> None:
    k = a.x.shape[1]
    num_columns = a.scale.shape[0] if isinstance(a.scale, Tensor) and a.scale.dim() else 0
    blocks = -(-num_columns // COLUMNS), -(-k // STEPS) * (STEPS // DEPTH), COLUMNS * DEPTH
    _check_length("x", k)
    for name, tensor, shape, dtype in (
        ("packed", a.packed, blocks, torch.int8),
        ("scale", a.scale, ("N",), torch.float32),
        ("sums", a.sums, (num_columns,), torch.int32),
        ("bias", a.bias, (num_columns,), torch.float32),
    ):
        if tensor is not None:
            check_shape(name, tensor, shape)
            check_dtype(name, tensor, (dtype,))
            check_same_device(name, tensor, "x", a.x)


def _check_direct(*values: Any) -> None:
    a = LinearInt8(*values[:-1])
    check_dtype("x", a.x, (torch.float32,))
    _check(a)


@custom_op("linear_int8", tensors=lines_of(LinearInt8), check=_check_direct)
def _op(x: Tensor, packed: Tensor, scale: Tensor, sums: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    """y [T, N]."""
    module: Any = resolve("linear_int8", OpSpec(x.device, x.dtype), backend)
    y: Tensor = module.linear_int8_fwd(LinearInt8(x, packed, scale, sums, bias))
    return y


@_op.register_fake
def _(x: Tensor, packed: Tensor, scale: Tensor, sums: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return x.new_empty((x.shape[0], scale.shape[0]))
