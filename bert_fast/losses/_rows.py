"""What losses of rows of embeddings share: their checks, and the precision that they are made in."""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from bert_fast.checks import check_dtype, check_floating, check_number, check_same_device, check_shape

__all__ = ["check_factor", "check_rows", "check_scores", "in_wide_precision"]

_F = TypeVar("_F", bound=Callable[..., Any])


def check_rows(**embeddings: Tensor) -> None:
    """Raises unless all are [B, D] of one floating dtype, shape and device, B >= 1; names are those of arguments."""
    (name, first), *others = embeddings.items()
    check_floating(name, first)
    check_shape(name, first, ("B", "D"))
    if not first.numel():
        raise ValueError(f"{name}: expected at least one row and one column, got shape {list(first.shape)}")
    for other, tensor in others:
        check_dtype(other, tensor, (first.dtype,))
        check_shape(other, tensor, tuple(first.shape))
        check_same_device(other, tensor, name, first)


def check_scores(name: str, scores: Tensor, like_name: str, like: Tensor) -> None:
    """Raises unless scores are numbers [B], one for each row."""
    check_shape(name, scores, (len(like),))
    check_same_device(name, scores, like_name, like)
    if scores.is_complex() or scores.dtype == torch.bool:
        raise TypeError(f"{name}: expected numbers, got {str(scores.dtype).removeprefix('torch.')}")


def check_factor(name: str, value: Any, *, is_positive: bool = True) -> float:
    """A finite number, above 0 (or from 0 on); raises otherwise."""
    number = check_number(name, value)
    if not math.isfinite(number) or not (number > 0 if is_positive else number >= 0):
        raise ValueError(f"{name}: expected a finite number {'above' if is_positive else 'from'} 0, got {value}")
    return number


def in_wide_precision(loss: _F) -> _F:
    """The loss without autocast, whose products of cosines have steps that a loss does not forgive."""

    @wraps(loss)
    def run(first: Tensor, *arguments: Any, **options: Any) -> Any:
        if not isinstance(first, Tensor):
            return loss(first, *arguments, **options)  # which says so
        with torch.autocast(first.device.type, enabled=False):
            return loss(first, *arguments, **options)

    return run  # type: ignore[return-value]
