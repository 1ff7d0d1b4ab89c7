"""Loading without drawing: an encoder whose weights come from a file is made without random numbers.

Drawing them takes longer than reading the file, and PyTorch's layers and ours draw one after the other. So while
`weights_follow` is on, modules made under `undrawn` have weights and biases without values, and those that the file
turned out to lack get them from `draw`. Small heads, and whatever users' classes add, are drawn as ever.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_weights_follow = ContextVar("weights_follow", default=False)
_MARK = "_is_undrawn"  # of a module; copies of it have the mark, too
# Of torch.nn.init and of tensors; by name, as transformers puts its own in their place while it loads a model.
_DRAWS = {"kaiming_uniform_", "uniform_", "normal_"}


class _WithoutDraws(TorchFunctionMode):
    """Functions that fill a tensor with random numbers leave it as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", None) in _DRAWS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


@contextmanager
def weights_follow() -> Iterator[None]:
    """Models made within, by this thread or task, are about to be given weights, and then to `draw`."""
    before = _weights_follow.set(True)
    try:
        yield
    finally:
        _weights_follow.reset(before)


@contextmanager
def undrawn(parent: nn.Module) -> Iterator[None]:
    """Where weights follow, modules that `parent` is given within are made without random numbers.

    For modules that `_init_weights` gives all their values.
    """
    if not _weights_follow.get():
        yield
        return
    before = set(parent.modules())
    with _WithoutDraws():
        yield
    for module in parent.modules():
        if module not in before:
            setattr(module, _MARK, True)


def is_undrawn(module: nn.Module) -> bool:
    """Whether the module was made without values."""
    return _MARK in module.__dict__


@torch.no_grad()
def draw(model: nn.Module, names: Iterable[str], initialize: Callable[[nn.Module], None]) -> None:
    """Initial values for those of a model's parameters that have none and were not loaded.

    names: of what was not loaded. initialize: gives a module its initial values; it is called on the CPU and in fp32,
    as when a model is made, so that values are the same wherever it goes.
    """
    without_values = [module for module in model.modules() if is_undrawn(module)]
    for module in without_values:
        delattr(module, _MARK)
    # By parameter, as one that is tied has names of modules that were drawn, too.
    owners = {p: (module, name) for module in without_values for name, p in module.named_parameters(recurse=False)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for parameter in dict.fromkeys(parameters[name] for name in names if name in parameters):
        if parameter in owners:
            module, name = owners[parameter]
            drawn = copy.deepcopy(module).to("cpu", torch.float32)
            initialize(drawn)
            parameter.copy_(getattr(drawn, name))
