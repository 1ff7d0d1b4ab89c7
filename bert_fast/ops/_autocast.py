"""What `torch.autocast` means to the matrix products here: cast the operands, as `torch.nn.functional.linear` does."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["autocast_operands"]


def autocast_operands(*operands: Any) -> tuple[Any, ...]:
    """The operands in the dtype that autocast asks of an op led by the first; all as they are where it is off.

    Only floating-point tensors are cast, and nothing where the first is fp64; whatever else stands among the operands
    is left to the checks that follow.
    """
    x = operands[0]
    if not isinstance(x, Tensor) or not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return operands
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in operands)
