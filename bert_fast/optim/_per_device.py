"""A tensor on each device that needs it."""

import torch
from torch import Tensor


class PerDevice:
    """A tensor, or None, that is copied to each device at most once."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor
        self._copies = {} if tensor is None else {tensor.device: tensor}

    def on(self, device: torch.device) -> Tensor | None:
        if self.tensor is not None and device not in self._copies:
            self._copies[device] = self.tensor.to(device, non_blocking=True)
        return self._copies.get(device)
