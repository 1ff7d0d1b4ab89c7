"""From text to batches."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bert_fast.data.packed_collator import PackedCollator
from bert_fast.data.token_store import TokenStore
from bert_fast.data.tokenize_files import tokenize_files

if TYPE_CHECKING:
    from bert_fast.data.batches import Batches, Source
    from bert_fast.data.examples import Examples
    from bert_fast.data.pretraining import PretrainingSource

__all__ = [
    "Batches",
    "Examples",
    "PackedCollator",
    "PretrainingSource",
    "Source",
    "TokenStore",
    "tokenize_files",
]

# Only training needs them: imported when they are asked for, so that importing bert_fast stays quick.
_MODULES = {
    "Batches": "batches",
    "Examples": "examples",
    "PretrainingSource": "pretraining",
    "Source": "batches",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
