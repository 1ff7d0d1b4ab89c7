"""What was done to the whole process: functions that were replaced, and hooks of every module.

A module says what was done to itself. It does not say that `nn.Linear.forward` was replaced for all, or that
`torch.nn.modules.module.register_module_forward_hook` waits for every call. Code that computes in place of modules asks
here; a list of 18 functions is compared in half a microsecond.
"""

import types
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import nn
from torch.nn.modules import module as _hooks

_MODULES = (
    "Linear.forward", "LayerNorm.forward", "Embedding.forward", "Dropout.forward", "Tanh.forward", "Module.__call__",
    "Module._call_impl", "Linear.__call__", "LayerNorm.__call__",
)  # fmt: skip
_FUNCTIONS = ("linear", "layer_norm", "embedding", "dropout", "gelu", "softmax", "scaled_dot_product_attention")
_BUILTIN = (types.BuiltinFunctionType, types.WrapperDescriptorType)


class Originals:
    """Functions of a library, and whether they are still those that the library has.

    owner: a module of Python; paths: of functions, from there ("Linear.forward"), two or more. A function is the
    library's if the library's code defined it. So one that was replaced before this object was made is found too.
    """

    def __init__(self, owner: Any, paths: Iterable[str]) -> None:
        self._owner, self._paths = owner, tuple(paths)
        self._library = owner.__name__.partition(".")[0]
        self._read = attrgetter(*self._paths)
        self._own: list[Any] = [None] * len(self._paths)  # the library's, once seen
        self._seen: Any = None  # what was read when all were the library's

    def replaced(self) -> Sequence[str]:
        """Paths of functions that are not the library's own; empty where all are."""
        found = self._read(self._owner)
        if found == self._seen:  # functions are equal only to themselves
            return ()
        for place, function in enumerate(found):
            if self._own[place] is None and is_of(function, self._library):
                self._own[place] = function
        paths = zip(self._paths, found, self._own, strict=True)
        names = [path for path, function, own in paths if function is not own]
        if not names:
            self._seen = found
        return names


def is_of(function: Any, library: str) -> bool:
    """Whether a library defined a function; what torch or the library itself wraps around one of its own counts."""
    while True:
        if isinstance(function, _BUILTIN):
            return library == "torch"
        defined_in = getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]
        if defined_in not in (library, "torch"):
            return False
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is None:
            return bool(defined_in == library)
        function = wrapped


_modules, _functions = Originals(nn, _MODULES), Originals(nn.functional, _FUNCTIONS)


def replaced_in_torch() -> Sequence[str]:
    """Which of torch's functions that our ops compute in place of were replaced, as they are found in `torch.nn`."""
    modules, functions = _modules.replaced(), _functions.replaced()
    return [*modules, *(f"functional.{name}" for name in functions)] if modules or functions else ()


# Hooks that every module's call would run: `any(GLOBAL_HOOKS)` where some are registered.
GLOBAL_HOOKS = (
    _hooks._global_forward_hooks, _hooks._global_forward_pre_hooks, _hooks._global_backward_hooks,
    _hooks._global_backward_pre_hooks,
)  # fmt: skip


def at_trace_time(function: Any) -> Any:
    """Marks a function whose result torch.compile takes as it is while it traces, without tracing it.

    As `torch.compiler.assume_constant_result`, which imports the compiler.
    """
    function._dynamo_marked_constant = True
    return function
