"""Peak memory of a function, counted tensor by tensor: the same on every machine, and on the meta device too."""

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Peak(TorchDispatchMode):
    """Adds up, after every operator, the storages made since the start that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given:  # a view, or what was written to, is not new
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def peak_bytes(function: Callable[[], Any]) -> int:
    """Bytes of the tensors that `function()` makes, when they are most.

    What lives only within one operator of PyTorch is not seen, nor is what a registered op makes inside.
    """
    with _Peak() as mode:
        function()
    return mode.peak
