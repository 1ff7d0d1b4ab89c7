"""What was concluded from modules, for as long as nobody has changed them.

Modules do not say that they were changed: a hook, another layer in place of one, `eval` of a part, a class whose
`forward` was replaced. Who computes in their place has to look at every call. The look that concludes something takes
microseconds for each module, in Python; the one that finds all as it was takes 50 nanoseconds, in C++
(`csrc/bindings/look.cpp`): it compares every attribute of every module inside, by identity, with those of then.

Not compared: what lies within attributes that are no dictionaries (configurations, tensors' forms).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from bert_fast import native
from bert_fast.modules.originals import GLOBAL_HOOKS

__all__ = ["concluded"]

_Module = TypeVar("_Module", bound=nn.Module)
_Found = TypeVar("_Found")


_LOOK = "_bert_fast_look"  # the attribute under which a module keeps what was concluded; copies keep nothing


def concluded(module: _Module, conclude: Callable[[_Module], _Found]) -> _Found:
    """What the function finds, looking at a module and those inside, their classes, and hooks of every module.

    A module has one such function. It is called again where anything was changed, where somebody traces, and at every
    call without the C++ extension.
    """
    if torch.compiler.is_compiling():
        return conclude(module)
    own = module.__dict__
    look = own.get(_LOOK)
    if look is not None and look.holds(module):
        return look.found  # type: ignore[no-any-return]
    extension = native.load()
    if extension is None or any(GLOBAL_HOOKS):
        return conclude(module)
    # Before anything is concluded: what another thread changes meanwhile is not to be taken for concluded from.
    look = extension.look_at(list(module.modules()), are_empty=GLOBAL_HOOKS, skipped=_LOOK)
    found = conclude(module)
    look.keep(found)
    own[_LOOK] = look
    return found
