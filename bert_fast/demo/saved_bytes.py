"""Memory that a forward pass keeps for its backward pass, counted at the source."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["saved_bytes"]


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd holds on to after `forward()`: distinct storages, without the parameters of `model`.

    Unlike peak memory, this is the same on every machine and does not depend on the allocator.

    Args:
        model: in training mode.
        forward: a forward pass of it; what it returns keeps the graph alive until the count is done.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # by address; the tensors stay alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            kept.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del output
    return total
