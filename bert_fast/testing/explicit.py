"""A forward and its explicit backward as one differentiable function, for gradcheck."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def explicit_function(
    forward: Callable[..., tuple[tuple[Tensor, ...], Any]], backward: Callable[..., Sequence[Tensor | None]]
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Ties `forward(*inputs) -> (outputs, saved)` and `backward(saved, *doutputs) -> dinputs` together.

    The outputs are the differentiable ones; `saved` is handed over as it is, so it must not hold what autograd tracks.
    """

    class Explicit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            outputs, ctx.saved = forward(*inputs)
            return outputs[0] if len(outputs) == 1 else outputs

        @staticmethod
        def backward(ctx: Any, *doutputs: Tensor) -> Any:
            return tuple(backward(ctx.saved, *doutputs))

    return Explicit.apply
