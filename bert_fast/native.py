"""Loads the optional C++ extension `bert_fast._native` (tokenizer core, CPU routines), once and lazily."""

import functools
import importlib
from types import ModuleType

from bert_fast.env import SETTINGS

__all__ = ["load", "unavailable_reason"]


@functools.cache
def _import() -> tuple[ModuleType | None, str | None]:
    if not SETTINGS.native:
        return None, "switched off by BERT_FAST_NATIVE=0"
    try:
        return importlib.import_module("bert_fast._native"), None
    except ImportError as error:
        return None, f"bert_fast._native cannot be imported ({error}); build it with `pip install -e .`"


@functools.cache
def load() -> ModuleType | None:
    """The extension module, or None where it is not built or switched off."""
    return _import()[0]


def unavailable_reason() -> str | None:
    """Why `load()` returns None; None when the extension is there."""
    return _import()[1]
