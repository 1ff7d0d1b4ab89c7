"""Classes that take the place of transformers' own on objects that exist: the same data, another forward.

`object.__class__ = fused_class(type(object))` fuses, `original_class` is the way back. A fused class is a subclass of
the one it replaces and goes by its name, so `isinstance`, saved configurations, messages and hooks see no difference.
A class that somebody derived from transformers' gets a fused class between itself and its base:

    transformers' BertModel          <- FusedBertModel                       (defined in `models.py`)
    class Sub(BertModel), theirs     <- Sub(Sub, FusedBertModel)             (made here, once)

so what Sub overrides stays in force, and what it leaves to its base is fast.
"""

import copyreg
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Fused", "fused_class", "is_replaced", "original_class", "replaces"]

_T = TypeVar("_T", bound=type)
_fused: dict[type, type] = {}  # class -> its fused class
_originals: dict[type, type] = {}  # the other way round
_lock = threading.Lock()


class Fused:
    """What all fused classes have in common: copies and pickles of a fused object are fused."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds classes by their names, and these are the original's.
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        original = _originals.get(type(self))
        if original is None or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        return _new, (original, *reduced[1][1:]), *reduced[2:]


def replaces(original: type) -> Callable[[_T], _T]:
    """Decorator: the class is the fused class of `original`, one of transformers'."""

    def register(fused: _T) -> _T:
        _take_name(fused, original)
        _fused[original] = fused
        _originals[fused] = original
        return fused

    return register


def fused_class(cls: type) -> type | None:
    """The fused class of `cls`: itself where it is one, None where nothing in its ancestry has one."""
    if issubclass(cls, Fused):
        return cls
    with _lock:
        if cls not in _fused:
            base = next((ancestor for ancestor in cls.__mro__ if ancestor in _fused), None)
            if base is None:
                return None
            metaclass: Any = type(cls)
            fused = metaclass(cls.__name__, (cls, _fused[base]), {"__doc__": cls.__doc__})
            _take_name(fused, cls)
            _fused[cls] = fused
            _originals[fused] = cls
        return _fused[cls]


def is_replaced(cls: type) -> bool:
    """Whether `cls` itself, not just an ancestor of it, has a fused class already."""
    return cls in _fused


def original_class(cls: type) -> type | None:
    """What a fused class replaces; None where `cls` is none (classes that FSDP2 derives from one are none)."""
    return _originals.get(cls)


def _take_name(fused: type, original: type) -> None:
    fused.__name__ = original.__name__
    fused.__qualname__ = original.__qualname__
    fused.__module__ = original.__module__


def _new(original: type, *arguments: Any) -> Any:
    """An empty object of the fused class, for pickle and copy to fill."""
    from bert_fast.huggingface import heads  # noqa: F401 - so that in a fresh process the classes are there

    cls = fused_class(original)
    assert cls is not None
    return cls.__new__(cls, *arguments)
