"""Memory that a forward pass keeps for its backward pass, counted at the source, in all and tensor by tensor."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd holds on to after `forward()`: distinct storages, without the parameters of `model`.

    Unlike peak memory, this is the same on every machine and does not depend on the allocator.

    Args:
        model: in training mode.
        forward: a forward pass of it; what it returns keeps the graph alive until the count is done.
    """
    with _keeping(model) as kept:
        output = forward()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del output
    return total


@dataclass(frozen=True)
class SavedStorage:
    """One piece of memory that backward needs, with all that refers to it.

    made_by: the op that wrote it, and which of its outputs where it has several ("linear_gelu_fwd output 1"); "input"
        for what was there before the forward pass.
    saved_by: the ops that saved it, in the order of forward; one that saved it as several tensors is there as often.
    shape, dtype: of the tensor that the first of them saved. nbytes: of the whole storage.
    """

    made_by: str
    saved_by: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def saved_storages(
    model: nn.Module, forward: Callable[[], Tensor], layer: nn.Module | None = None
) -> list[SavedStorage]:
    """What `saved_bytes` counts, storage by storage, in the order in which forward saves it.

    layer: a submodule that is called once and turns one tensor into one; only what its ops are the first to save is
    listed, so an input that the layer before has saved as its own result is that layer's. Without it everything that
    the result of `forward` depends on.
    """
    bounds: list[Node | None] = []
    with ExitStack() as stack:
        if layer is not None:
            hook = layer.register_forward_hook(
                lambda _, args, kwargs, result: bounds.extend((_graph_of((args, kwargs)), _graph_of(result))),
                with_kwargs=True,
            )
            stack.callback(hook.remove)
        kept = stack.enter_context(_keeping(model))
        makers = stack.enter_context(_Makers())
        output = forward()
    if layer is not None:
        assert len(bounds) == 2, f"the layer was called {len(bounds) // 2} times, once was expected"
    start, end = bounds or (None, output.grad_fn)
    before = _nodes(start)
    savers: dict[int, list[str]] = {}
    first: dict[int, Tensor] = {}
    for node, tensor in _saved(_nodes(end) - before):
        if _address(tensor) in kept:
            first.setdefault(_address(tensor), tensor)
            savers.setdefault(_address(tensor), []).append(_op(node))
    for _, tensor in _saved(before):
        first.pop(_address(tensor), None)
    return [
        SavedStorage(
            makers.by_address.get(address, "input"), tuple(savers[address]), tuple(tensor.shape), tensor.dtype,
            tensor.untyped_storage().nbytes(),
        )
        for address, tensor in first.items()
    ]  # fmt: skip


@contextmanager
def _keeping(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Yields what is saved within, by its storage's address; the tensors stay alive, so that none is used twice."""
    parameters = {_address(parameter) for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in parameters:
            kept.setdefault(_address(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Makers(TorchDispatchMode):
    """Notes which op made each storage: the last that returned memory which none of its inputs had, or filled it."""

    def __init__(self) -> None:
        super().__init__()
        self.by_address: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        of_inputs = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = tree_leaves(result)
        name = func.name().partition("::")[2].partition(".")[0]
        for index, leaf in enumerate(outputs):
            if not isinstance(leaf, Tensor):
                continue
            address = _address(leaf)
            if address not in of_inputs or self.by_address.get(address, "").startswith("empty"):
                self.by_address[address] = f"{name} output {index}" if len(outputs) > 1 else name
        return result


def _graph_of(values: Any) -> Node | None:
    """Where in autograd's graph the first tensor comes from."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return tensors[0].grad_fn if tensors else None


def _nodes(end: Node | None) -> set[Node]:
    """Everything that backward runs through from there on."""
    seen: set[Node] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += (following for following, _ in node.next_functions)
    return seen


def _saved(nodes: set[Node]) -> Iterator[tuple[Node, Tensor]]:
    """Saved tensors of the nodes, in the order in which forward made those."""
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        # Ops written in Python have a tuple, PyTorch's own an attribute for each tensor or list of tensors.
        names = [name for name in dir(node) if name.startswith("_saved_")]
        values = getattr(node, "saved_tensors", None) or [getattr(node, name) for name in names]
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                yield node, leaf


def _op(node: Node) -> str:
    """The op of a node: "native_layer_norm" of NativeLayerNormBackward0, "linear_gelu_fwd" of one registered here."""
    name = node.name().removeprefix("GeneratedBackwardFor_bert_fast_").removesuffix("_defaultBackward")
    name = re.sub(r"Backward\d*$", "", name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
