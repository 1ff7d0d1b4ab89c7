"""With this folder on PYTHONPATH, `bert_fast._native` is the module that `tools/check.py sanitize` builds.

Python imports a module of this name when it starts, so that the tests' own processes use that one, too.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType

MODULE = Path(__file__).resolve().parents[2] / "build" / "sanitized-module" / f"_native{EXTENSION_SUFFIXES[0]}"


class _Finder:
    """Finds this one module; all others are left to those who come after."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, MODULE) if name == "bert_fast._native" else None


sys.meta_path.insert(0, _Finder)
