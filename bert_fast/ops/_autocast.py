"""What `torch.autocast` means to the matrix products here: cast the operands, as `torch.nn.functional.linear` does."""

import torch
from torch import Tensor

__all__ = ["cast_to_autocast"]


def cast_to_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in autocast's dtype where autocast is on for the first one's device, else unchanged."""
    first = tensors[0]
    assert first is not None
    device_type = first.device.type
    if not torch.is_autocast_enabled(device_type) or first.dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(None if t is None else t.to(dtype) for t in tensors)
