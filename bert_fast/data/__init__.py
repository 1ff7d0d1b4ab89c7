"""From text to batches."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bert_fast.data.packed_collator import PackedCollator
from bert_fast.data.token_store import TokenStore
from bert_fast.data.tokenize_files import tokenize_files

if TYPE_CHECKING:
    from bert_fast.data.batches import Batches, Source
    from bert_fast.data.classification import ClassificationSource
    from bert_fast.data.multiple_choice import MultipleChoiceSource
    from bert_fast.data.pretraining import PretrainingSource
    from bert_fast.data.question_answering import QuestionAnsweringSource
    from bert_fast.data.token_classification import TokenClassificationSource

__all__ = [
    "Batches",
    "ClassificationSource",
    "MultipleChoiceSource",
    "PackedCollator",
    "PretrainingSource",
    "QuestionAnsweringSource",
    "Source",
    "TokenClassificationSource",
    "TokenStore",
    "tokenize_files",
]

# Only training needs them: imported when they are asked for, so that importing bert_fast stays quick.
_MODULES = {
    "Batches": "batches",
    "ClassificationSource": "classification",
    "MultipleChoiceSource": "multiple_choice",
    "PretrainingSource": "pretraining",
    "QuestionAnsweringSource": "question_answering",
    "Source": "batches",
    "TokenClassificationSource": "token_classification",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
