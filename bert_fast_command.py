"""The program `bert-fast`. `--version` and `--help` are answered at once: what they need does not import torch.

A module beside the package: importing any part of `bert_fast` runs `bert_fast/__init__.py`, which imports torch.
"""

import importlib.util
import sys
import types
from typing import NoReturn

_AT_ONCE: tuple[list[str], ...] = ([], ["--version"], ["--help"], ["-h"])


def command() -> NoReturn:
    """Runs the command line."""
    if sys.argv[1:] in _AT_ONCE:
        spec = importlib.util.find_spec("bert_fast")
        assert spec is not None and spec.submodule_search_locations is not None
        package = types.ModuleType("bert_fast")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["bert_fast"] = package  # with its modules, without what __init__.py imports
    from bert_fast.cli.main import command as run

    run()


if __name__ == "__main__":
    command()
