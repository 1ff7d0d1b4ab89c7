"""Checks of arguments at the public boundary: the message names the argument, the expected and the actual."""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["check_dropout_p", "check_dtype", "check_same_device", "check_shape"]


def check_shape(name: str, tensor: Any, expected: Sequence[int | str]) -> None:
    """Raises unless `tensor` has the expected shape; a string stands for any size and documents its meaning.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: wrong rank or size.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")
    fits = tensor.dim() == len(expected) and all(
        isinstance(want, str) or size == want for size, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        wanted = "[" + ", ".join(str(size) for size in expected) + "]"
        raise ValueError(f"{name}: expected shape {wanted}, got {list(tensor.shape)}")


def check_dtype(name: str, tensor: Any, allowed: Sequence[torch.dtype]) -> None:
    """Raises TypeError unless the tensor's dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name}: expected dtype {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_same_device(name: str, tensor: Any, other_name: str, other: Any) -> None:
    """Raises ValueError unless both tensors live on one device."""
    if tensor.device != other.device:
        raise ValueError(f"{name}: expected device {other.device} (that of {other_name}), got {tensor.device}")


def check_dropout_p(name: str, p: float) -> None:
    """Raises ValueError unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name}: expected a probability in [0, 1], got {p}")
