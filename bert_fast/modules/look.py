"""What follows from a module and those in it, concluded once and kept while all of them are as they were.

Modules do not say that they were changed, so each call looks at them again. The C++ extension does it in one call
(`csrc/bindings/look.cpp` says what it compares). Without the extension the conclusion is drawn anew at every call.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from bert_fast import native
from bert_fast.modules.originals import GLOBAL_HOOKS

_Tensors = Sequence[Tensor | None]


class Concluded:
    """A function of a module, remembered by module.

    function: reads what lies in the `__dict__` of modules below the one it is given, their classes and GLOBAL_HOOKS,
    and nothing else that may change: of tensors their class only, no contents of lists, tuples, sets and dictionaries
    but `_modules`, `_parameters` and hooks. It returns a conclusion that refers to no module or tensor, and the
    parameters that come with it. It is not to be traced by torch.compile.
    """

    def __init__(self, function: Callable[[Any], tuple[Any, _Tensors]]) -> None:
        self._function = function
        self._known: dict[int, tuple[Any, Any, weakref.ref[nn.Module]]] = {}  # by id of the module

    def __call__(self, module: nn.Module) -> tuple[Any, _Tensors]:
        """What the function returns for a module now."""
        known = self._known.get(id(module))
        if known is not None:
            tensors = known[0].tensors(module)
            if tensors is not None:
                return known[1], tensors
        return self._anew(module)

    def _anew(self, module: nn.Module) -> tuple[Any, _Tensors]:
        look = _look_at(module)
        conclusion, tensors = self._function(module)
        # As it was before the function looked.
        if look is not None and _keeps(look, tensors) and look.tensors(module) is not None:
            key = id(module)
            reference = weakref.ref(module, lambda _: self._known.pop(key, None))
            self._known[key] = look, conclusion, reference
        return conclusion, tensors


def _keeps(look: Any, tensors: _Tensors) -> bool:
    """Whether the tensors are parameters of the modules, which the look will find again."""
    try:
        look.keep(tensors)
    except TypeError:
        return False
    return True


def _look_at(module: nn.Module) -> Any:
    """A `Look`; None where there is no extension, or where it cannot tell whether such a module has changed."""
    extension = native.load()
    if extension is None:
        return None
    try:
        return extension.Look(module, GLOBAL_HOOKS)
    except TypeError:
        return None
