"""The tasks of `bert-fast finetune` by their words on the command line."""

import importlib
from typing import Any

__all__ = ["TASKS", "task_named"]

# word -> (module, class), of which only the one that is asked for is imported
TASKS = {
    "classify": ("classification", "Classification"),
    "ner": ("token_classification", "TokenClassification"),
    "qa": ("question_answering", "QuestionAnswering"),
    "choice": ("multiple_choice", "MultipleChoice"),
}


def task_named(name: str) -> Any:
    """The class of a task. Raises ValueError for another word."""
    if name not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {name!r}")
    module, kind = TASKS[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)
