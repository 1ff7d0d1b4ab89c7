"""Memory that a forward pass keeps for its backward pass, counted at the source."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor], inputs: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd holds on to after `forward()`: distinct storages, without the parameters of `model`.

    Unlike peak memory, this is the same on every machine and does not depend on the allocator.

    Args:
        model: in training mode.
        forward: a forward pass of it; what it returns keeps the graph alive until the count is done.
        inputs: what is left out, too.
    """
    known = {_address(tensor) for tensor in (*model.parameters(), *inputs)}
    kept: dict[int, Tensor] = {}  # the tensors stay alive, so that no storage is used twice

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in known:
            kept.setdefault(_address(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del output
    return total


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
