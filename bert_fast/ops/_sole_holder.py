"""Whether backward may write over its incoming gradient: only if backward holds the sole reference to its memory.

PyTorch's engine adds up gradients in place by the same rule. The number of references in that case depends on the
versions of PyTorch and Python. So it is counted once, on a gradient that one function makes for one other, directly or
through a view. A hook that keeps it, `torch.autograd.grad(..., inputs=[y])`, the caller's own
gradient and a second consumer each add one.
"""

import functools
import sys
from typing import Any

import torch
from torch import Tensor

_Holders = tuple[int, ...]


def holders(gradient: Tensor) -> _Holders:
    """Numbers of references to a gradient, to its storage, and to the tensor that it is a view of.

    To be called in the `backward` of an autograd function, with its argument as it came.
    """
    base = gradient._base
    of_base = () if base is None else (base._use_count(), sys.getrefcount(base))  # type: ignore[attr-defined]
    storage = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    return gradient._use_count(), sys.getrefcount(gradient), storage, *of_base  # type: ignore[attr-defined]


class _Maker(torch.autograd.Function):
    """Its gradient is fresh memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.clone()


class _Counter(torch.autograd.Function):
    """Counts who holds the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: set[_Holders]) -> Tensor:
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.found.add(holders(dy))
        return dy, None


@functools.cache
def _of_one() -> frozenset[_Holders]:
    """What `holders` finds where there is one holder; empty where this PyTorch does not say."""
    found: set[_Holders] = set()
    if not (hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")):
        return frozenset()
    with torch.enable_grad(), torch.device("cpu"):
        for shape in ((4,), (2, 2)):
            y = _Counter.apply(torch.zeros(4, requires_grad=True), found)
            _Maker.apply(y if shape == (4,) else y.view(shape)).sum().backward()
    return frozenset(found)


def is_sole(found: _Holders) -> bool:
    """Whether `holders` found these numbers for a gradient with one holder, in a backward that is not recorded."""
    return not torch.is_grad_enabled() and found in _of_one()
