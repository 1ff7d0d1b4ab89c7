"""Checks that the linear ops share: x, and parameters that may be wider than it."""

from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import check_dtype, check_floating, check_same_device, check_shape
from bert_fast.reference.activations import ACTIVATIONS

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_STRIDED = torch.strided
_HALF = (torch.float16, torch.bfloat16)


def check_input(name: str, x: Any) -> None:
    """Raises unless x is a Tensor [T, K] of fp32, fp16, bf16 or fp64."""
    if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and x.dim() == 2 and x.dtype in _DTYPES:
        return
    check_shape(name, x, ("T", "K"))
    check_floating(name, x)
    check_dtype(name, x, _DTYPES)


def check_parameters(
    weight_name: str, weight: Any, bias_name: str, bias: Any, num_columns: int, x: Tensor, num_rows: int | str = "N"
) -> None:
    """Raises unless weight is a Tensor [num_rows, num_columns] beside x, and bias None or one [N] of its dtype.

    weight: dtype of x or, beside half precision, fp32.
    """
    # Parameters nearly always pass, which these comparisons find faster than the checks below.
    if isinstance(weight, Tensor) and weight.layout is _STRIDED and not weight.is_nested:
        shape, dtype, device = weight.shape, weight.dtype, weight.device
        if (
            len(shape) == 2
            and shape[1] == num_columns
            and (isinstance(num_rows, str) or shape[0] == num_rows)
            and (dtype is x.dtype or (dtype is torch.float32 and x.dtype in _HALF))
            and device == x.device
        ):
            is_dense = isinstance(bias, Tensor) and bias.layout is _STRIDED and not bias.is_nested
            if bias is None or (is_dense and bias.dtype is dtype and bias.device == device and bias.shape == shape[:1]):
                return
    check_shape(weight_name, weight, (num_rows, num_columns))
    if weight.dtype is not x.dtype and not (weight.dtype == torch.float32 and x.dtype in _HALF):
        wanted = _name(x.dtype) + " (that of x)" + (" or float32" if x.dtype in _HALF else "")
        raise TypeError(f"{weight_name}: expected dtype {wanted}, got {_name(weight.dtype)}")
    check_same_device(weight_name, weight, "x", x)
    if bias is None:
        return
    check_shape(bias_name, bias, (weight.shape[0],))
    if bias.dtype is not weight.dtype:
        raise TypeError(
            f"{bias_name}: expected dtype {_name(weight.dtype)} (that of {weight_name}), got {_name(bias.dtype)}"
        )
    check_same_device(bias_name, bias, "x", x)


def check_activation(hidden_act: Any) -> None:
    """Raises unless hidden_act is a name that a configuration may give."""
    if not isinstance(hidden_act, str):
        raise TypeError(f"hidden_act: expected a string, got {type(hidden_act).__name__}")
    if hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act: expected one of {sorted(ACTIVATIONS)}, got {hidden_act!r}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
