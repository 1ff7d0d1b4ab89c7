"""What tasks of fine-tuning have in common."""

from dataclasses import dataclass, field
from typing import Any

from bert_fast.data.arguments import check_tokenizer_kind
from bert_fast.tokenization import Tokenizer


@dataclass
class TaskArguments:
    """Files of examples."""

    train_file: str | None = field(default=None, metadata={"help": "Examples to learn from."})
    validation_file: str | None = field(default=None, metadata={"help": "Examples to judge by."})


class Task:
    """How examples are read, and what the answers of a model to them mean.

    Args:
        arguments: files, columns and sizes: the task's `Arguments`.
        tokenizer: as the model's.
        labels: names of the classes in the order of a model's outputs; None: those of the first labelled data that is
            read. Tasks whose answers have no names do not look at them.
    """

    greater_is_better = True

    def __init__(self, arguments: Any, tokenizer: Tokenizer, labels: list[str] | None = None) -> None:
        check_tokenizer_kind(tokenizer)
        self.arguments, self.tokenizer, self.labels = arguments, tokenizer, labels

    def config(self) -> dict[str, Any]:
        """Returns what the examples decide of a model's configuration."""
        return {}
