"""What `torch.autocast` means to the matrix products here: cast the operands, as `torch.nn.functional.linear` does."""

import torch
from torch import Tensor

__all__ = ["autocast_dtype"]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks of an op led by x; None where it is off (fp64 is never cast)."""
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device_type)
