"""The best of several answers to a question: tables as those of SWAG and COPA.

Every choice is a sequence of its own, with what it belongs to; the columns say which:

    sent1, sent2, ending0, ending1, ...     [CLS] sent1 [SEP] sent2 ending [SEP]
    premise, question, choice1, choice2     [CLS] premise [SEP] choice [SEP]    where the question is "effect"
                                            [CLS] choice [SEP] premise [SEP]    where it is "cause"

Cause and effect stand in the order in which they happen, so that no words of any language have to be put between them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from bert_fast.checks import check_count
from bert_fast.data.examples import Examples
from bert_fast.data.files import column_texts, column_values, read_rows, value_error
from bert_fast.data.sequences import Sequences
from bert_fast.models import BertForMultipleChoice
from bert_fast.training.tasks.task import Task, TaskArguments

_SWAG = ["sent1", "sent2", *(f"ending{number}" for number in range(100))]
_COPA = ["premise", "question", *(f"choice{number}" for number in range(1, 100))]


@dataclass
class MultipleChoiceArguments(TaskArguments):
    """Questions with several answers to choose from, as in SWAG and COPA: CSV, JSON lines, Parquet."""

    label_column_name: str = field(default="label", metadata={"help": "Column of the right choices."})
    max_seq_length: int = field(default=128, metadata={"help": "Most tokens of a choice with its context."})

    def __post_init__(self) -> None:
        check_count("max_seq_length", self.max_seq_length, 5)  # XLM-R's pairs have four special tokens


class MultipleChoice(Task):
    """Chooses one of several answers to a question (`BertForMultipleChoice`); its metric is accuracy."""

    Arguments = MultipleChoiceArguments
    model_class = BertForMultipleChoice
    metric_for_best_model = "accuracy"

    def read(self, data: Any, is_labelled: bool = True) -> Examples:
        """Returns the examples of a file, a `datasets.Dataset` or a list of mappings.

        A label is the number of a choice, from 0, or the name of its column.

        Raises:
            OSError, SourceError: see `read_rows`; the columns are not those of either table; a text is no string, a
                question is neither "cause" nor "effect", a label is no choice. The message names file and line.
        """
        label = self.arguments.label_column_name
        rows = read_rows(data, [label] if is_labelled else [], optional=[*_SWAG, *_COPA])
        there = rows.column_names
        known = _COPA if "premise" in there else _SWAG
        if not set(known[:4]) <= set(there):
            read_rows(data, known[:4])  # raises the error that names the columns that are there
        columns = [*takewhile(there.__contains__, known)]
        pairs: list[tuple[str, str]] = []
        texts = (column_texts(data, rows, column) for column in columns)
        for row, (first, second, *choices) in enumerate(zip(*texts, strict=True)):
            if known is _SWAG:
                pairs += [(first, f"{second} {choice}".strip()) for choice in choices]
            elif second == "effect":
                pairs += [(first, choice) for choice in choices]
            elif second == "cause":
                pairs += [(choice, first) for choice in choices]
            else:
                raise value_error(data, row, "question", f"expected 'cause' or 'effect', got {second!r}")
        labels = {"labels": self._numbers(data, column_values(rows, label), columns[2:])} if is_labelled else {}
        firsts, seconds = map(list, zip(*pairs, strict=True))
        sequences = Sequences.joined(self.tokenizer, firsts, seconds, max_length=self.arguments.max_seq_length)
        return Examples(sequences, labels, len(columns) - 2, rows)

    def metrics(self, examples: Examples, predictions: np.ndarray, label_ids: np.ndarray) -> dict[str, float]:
        """Returns the accuracy of logits [n, num_choices]."""
        return {"accuracy": float((predictions.argmax(axis=-1) == label_ids).mean())}

    def rows(self, examples: Examples, predictions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yields label (the number of the choice), gold (where it is known), probabilities, and the row's texts."""
        shares = torch.from_numpy(predictions).double().softmax(dim=-1).tolist()
        label = self.arguments.label_column_name
        for index, row in enumerate(examples.row_of.tolist()):
            answer: dict[str, Any] = {"label": int(predictions[index].argmax()), "probabilities": shares[index]}
            if examples.labels:
                answer["gold"] = int(examples.labels["labels"][index])
            yield answer | {name: text for name, text in examples.rows[row].items() if name != label}

    def _numbers(self, data: Any, values: list[Any], columns: list[str]) -> np.ndarray:
        """The right choices: int64 [n]."""
        numbers = {name: number for number, name in enumerate(columns)}
        numbers |= {str(number): number for number in range(len(columns))}
        for row, value in enumerate(values):
            if str(value) not in numbers:
                expected = f"expected a choice from 0 to {len(columns) - 1}, or its column"
                raise value_error(data, row, self.arguments.label_column_name, f"{expected}, got {value!r}")
        return np.array([numbers[str(value)] for value in values], dtype=np.int64)
