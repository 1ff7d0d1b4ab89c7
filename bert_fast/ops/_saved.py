"""What autograd keeps for backward, where others' hooks may hand back something else (`saved_tensors_hooks`)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks

__all__ = ["keep_tensors", "kept_tensors"]


def keep_tensors(ctx: Any, tensors: Sequence[Tensor | None]) -> None:
    """As `ctx.save_for_backward`."""
    ctx.save_for_backward(*tensors)
    if _top_saved_tensors_default_hooks(True) is not None:
        ctx.kept_shapes = [None if one is None else one.shape for one in tensors]


def kept_tensors(ctx: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """As `ctx.saved_tensors`.

    Raises: RuntimeError that names the tensor where a hook returned one of another shape, whose end kernels would miss.
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
