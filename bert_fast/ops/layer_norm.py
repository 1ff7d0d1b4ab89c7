"""y = LayerNorm(x), forward and backward, on any back-end.

Registered as `bert_fast::layer_norm_fwd` and `_bwd` on [T, H]; autograd saves x, mean and rstd besides the weight.
"""

import torch
from torch import Tensor
from torch.nn import Parameter

from bert_fast.backend import requested
from bert_fast.checks import check_dtype, check_number, check_same_device, check_shape, check_tensor
from bert_fast.ops._autocast import autocast_operands
from bert_fast.ops._define import define
from bert_fast.reference.layer_norm import LayerNorm

_STRIDED = torch.strided
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-12, backend: str | None = None) -> Tensor:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension.

    Args:
        x (Tensor [..., H], fp32/fp16/bf16/fp64): any number of leading dimensions, any strides; rows are copied
            together first where the leading dimensions cannot be seen as one. H up to 8,192 on the Triton back-end.
        weight (Tensor [H]): dtype of x or fp32.
        bias (Tensor [H], dtype of weight): added at the end.
        eps: added to the variance as given.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor, shape and dtype of x), contiguous, never an alias of an input.

    Raises:
        TypeError, ValueError: the message names the argument.
        BackendError: the named back-end cannot run the call.

    Precision:
        statistics and arithmetic in fp32 (fp64 for fp64), rounded once. Differentiable once, in x, weight and bias.
        Deterministic: two-stage sums, no atomics. No device sync.

    Autocast:
        x is cast to the autocast dtype (fp64 stays) and so is y, so the residual stream stays in it; weight and bias
        keep their dtype.

    Saves x, mean and rstd: T * H elements and 2 * T fp32 numbers. Nothing under `torch.no_grad`.
    Source: Ba et al. 2016 (arXiv:1607.06450), section 3.

    Example:
        >>> x = torch.randn(2, 3, 8)
        >>> y = ops.layer_norm(x, torch.ones(8), torch.zeros(8))
        >>> torch.allclose(y, torch.nn.functional.layer_norm(x, (8,), eps=1e-12), atol=1e-5)
        True
    """
    (x,) = autocast_operands(x)
    _check(x, weight, bias)
    is_matrix = x.dim() == 2 and x.stride(0) == x.shape[1]  # a view takes as long as all checks, in backward too
    rows = x if is_matrix else x.reshape(-1, x.shape[-1])
    y = _op(rows, weight, bias, check_number("eps", eps), requested(backend))[0]
    return y if is_matrix else y.view(x.shape)


def _check(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    if type(x) is Tensor and x.dtype in _DTYPES and x.layout is _STRIDED and not x.is_nested and x.dim() > 0:
        width = x.shape[-1:]
        for p in (weight, bias):
            if type(p) is not Parameter or p.dtype is not x.dtype or p.shape != width or p.device != x.device:
                break
        else:
            if width[0]:
                return  # as nearly always, at a third of the cost of the checks, which say what is wrong
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


_op = define(
    "layer_norm",
    LayerNorm,
    outputs={"y": "x T H", "mean": "s T", "rstd": "s T"},
    backward="dy x weight mean rstd",
    gradients="x weight bias",
    last_dimension="hidden_size",
)
