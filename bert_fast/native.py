"""Loads the optional C++ extension `bert_fast._native` (tokenizer core, CPU routines), once and lazily."""

import functools
import importlib
from pathlib import Path
from types import ModuleType

from bert_fast.env import SETTINGS


@functools.cache
def _import() -> tuple[ModuleType | None, str | None]:
    if not SETTINGS.native:
        return None, "switched off by BERT_FAST_NATIVE=0"
    try:
        return importlib.import_module("bert_fast._native"), None
    except ImportError as error:
        note = Path(__file__).with_name("_no_native.txt")  # setup.py leaves it in a package without the extension
        if note.is_file():
            return None, f"not built when bert_fast was installed: {note.read_text(encoding='utf-8').strip()}"
        return None, f"bert_fast._native cannot be imported ({error}); build it with `pip install -e .`"


@functools.cache
def load() -> ModuleType | None:
    """The extension module, or None where it is not built or switched off."""
    return _import()[0]


def unavailable_reason() -> str | None:
    """Why `load()` returns None; None when the extension is there."""
    return _import()[1]
