"""Saves tensors for backward, and checks what hooks on saved tensors return (`saved_tensors_hooks`)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks


def keep_tensors(ctx: Any, tensors: Sequence[Tensor | None]) -> None:
    """Saves tensors as `ctx.save_for_backward` does, and their shapes if hooks on saved tensors are active."""
    ctx.save_for_backward(*tensors)
    if _top_saved_tensors_default_hooks(True) is not None:
        ctx.kept_shapes = [None if one is None else one.shape for one in tensors]


def kept_tensors(ctx: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Returns `ctx.saved_tensors`. names: of the tensors, for messages.

    Raises:
        RuntimeError: a hook returned a tensor of another shape. Kernels would read beyond its end.
    """
    tensors: tuple[Any, ...] = ctx.saved_tensors
    shapes = getattr(ctx, "kept_shapes", None)
    if shapes is not None:
        for name, shape, one in zip(names, shapes, tensors, strict=True):
            if one is not None and one.shape != shape:
                raise RuntimeError(
                    f"{name}: expected shape {list(shape)} back from hooks on saved tensors, got {list(one.shape)}"
                )
    return tensors
