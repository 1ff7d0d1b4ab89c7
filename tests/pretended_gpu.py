"""Tensors that say they are on a GPU, over memory of the CPU; and what of them was asked back by the host.

Unlike the null driver's, they are somewhere else than the CPU's tensors: what mixes the two is refused as on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda", 0)
# Operators that return to the host what lies on a device, or whose results have a size that only values tell.
_SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_consecutive"}
_COPIES = {"_to_copy", "copy_"}


class OnGpu(Tensor):
    """A tensor of the CPU, pretended to be elsewhere."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGpu":
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=GPU
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _METHODS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func}: expected to be run within PretendedGpu")


class PretendedGpu(TorchDispatchMode):
    """Within the context, tensors can be made on the device "cuda"; `syncs` are the operators that waited for it."""

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__()
        self.syncs: list[str] = []
        self.num_pinned = 0
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: self._pin(tensor))

    @contextmanager
    def waits(self, syncs: list[str], num_pinned: int = 0) -> Iterator[None]:
        """Fails unless what happens within the context waits for these operators, and pins as many tensors."""
        self.syncs, self.num_pinned = [], 0
        with self:
            yield
        assert (self.syncs, self.num_pinned) == (syncs, num_pinned)

    def moved(self, model: nn.Module) -> nn.Module:
        """The model with its parameters and buffers there; it is to be evaluated or trained without gradients."""
        with self:
            for module in model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = nn.Parameter(OnGpu(parameter.detach()), requires_grad=False)
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = OnGpu(buffer)
        return model

    def _pin(self, tensor: Tensor) -> Tensor:
        assert not isinstance(tensor, OnGpu)
        self.num_pinned += 1
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        is_there = any(isinstance(one, OnGpu) for one in tensors)
        asked = kwargs.get("device")
        goes = is_there if asked is None else torch.device(asked).type == "cuda"
        if is_there:
            others = [one for one in tensors if not isinstance(one, OnGpu) and one.dim()]
            if others and name not in _COPIES:
                raise RuntimeError(f"{func}: expected all tensors on one device, got {func} of {GPU} and cpu")
            if name in _SYNCS or (name in _COPIES and not goes) or _has_bool_index(name, tensors):
                self.syncs.append(name)
            goes = goes and name != "_local_scalar_dense"
        if goes and name == "_to_copy" and not is_there:
            assert kwargs.get("non_blocking"), "a copy that the host waits for"
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        made = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        return tree_map(_on_gpu, made) if goes else made


def _item(x: Tensor, index: Any) -> Tensor:
    """x[index], by operators."""
    dim, items = 0, index if isinstance(index, tuple) else (index,)
    for place, one in enumerate(items):
        if one is ...:
            dim = x.dim() - len(items) + place + 1
            continue
        if isinstance(one, int):
            x = x.select(dim, one)
            continue
        if isinstance(one, slice):
            x = torch.ops.aten.slice(x, dim, one.start, one.stop, one.step or 1)
        elif one is None:
            x = x.unsqueeze(dim)
        else:
            x = torch.ops.aten.index(x, [*([None] * dim), one])
        dim += 1
    return x


# What no operator makes, and what asks for a GPU's driver before it is one.
_METHODS = {
    Tensor.tolist: lambda x: x.to("cpu").tolist(),
    Tensor.__getitem__: _item,
    Tensor.__invert__: torch.ops.aten.bitwise_not,
    Tensor.contiguous: lambda x: (
        x if x.is_contiguous() else torch.ops.aten.clone(x, memory_format=torch.contiguous_format)
    ),
    Tensor.nonzero: torch.ops.aten.nonzero,
}


def _has_bool_index(name: str, tensors: list[Tensor]) -> bool:
    return name in ("index", "index_put_", "index_put") and any(one.dtype is torch.bool for one in tensors[1:])


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnGpu) else value


def _on_gpu(value: Any) -> Any:
    return OnGpu(value) if isinstance(value, Tensor) else value
