"""A class, or a number, for a text or a pair of texts."""

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bert_fast.checks import check_count, check_flag
from bert_fast.data.examples import Examples
from bert_fast.data.files import column_texts, column_values, read_rows, value_error
from bert_fast.data.sequences import Sequences
from bert_fast.models import BertForSequenceClassification
from bert_fast.numerals import table_number
from bert_fast.training.tasks.task import Task, TaskArguments


@dataclass
class ClassificationArguments(TaskArguments):
    """Texts, or pairs of texts, each with a label or a number: TSV, CSV, JSON lines, Parquet."""

    text_column_name: str = field(
        default="text", metadata={"help": "Column of the texts; of a file without a header its number, from 0."}
    )
    text_pair_column_name: str | None = field(default=None, metadata={"help": "Column of second texts."})
    label_column_name: str = field(default="label", metadata={"help": "Column of the labels."})
    do_regression: bool = field(default=False, metadata={"help": "Labels are numbers to come close to, no classes."})
    max_seq_length: int = field(default=128, metadata={"help": "Most tokens of an example; longer texts are cut."})

    def __post_init__(self) -> None:
        check_flag("do_regression", self.do_regression)
        check_count("max_seq_length", self.max_seq_length, 5)  # XLM-R's pairs have four special tokens


class Classification(Task):
    """Gives texts, or pairs of texts, a class or a number (`BertForSequenceClassification`).

    Metrics of classes: accuracy; f1 (of two classes: that of labels[1]; of more: the mean over classes, "macro");
    matthews_correlation. Of numbers: pearson, spearman (0 where all predictions, or all labels, are the same), mse.

    Labels that are not given are sorted, whole numbers as numbers. Of a task with numbers there is one label.
    """

    Arguments = ClassificationArguments
    model_class = BertForSequenceClassification
    metric_for_best_model = "accuracy"

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.is_regression = self.arguments.do_regression or (self.labels is not None and len(self.labels) == 1)
        if self.is_regression:
            self.metric_for_best_model = "pearson"

    def read(self, data: Any, is_labelled: bool = True) -> Examples:
        """Returns the examples of a file, a `datasets.Dataset` or a list of mappings.

        Raises:
            OSError, SourceError: see `read_rows`; a text is no string; a label is missing, no number, or not among
                `labels`; all examples have the same one. The message names file and line.
        """
        columns, label = self._text_columns(), self.arguments.label_column_name
        rows = read_rows(data, [*columns, label] if is_labelled else columns)
        texts = [column_texts(data, rows, column) for column in columns]
        numbers_of = self._numbers if self.is_regression else self._classes
        labels = {"labels": numbers_of(data, column_values(rows, label))} if is_labelled else {}
        sequences = Sequences.joined(self.tokenizer, *texts, max_length=self.arguments.max_seq_length)
        return Examples(sequences, labels, rows=rows)

    def config(self) -> dict[str, Any]:
        """See `Task.config`."""
        if self.is_regression:
            return {"num_labels": 1, "problem_type": "regression"}
        return {"id2label": dict(enumerate(self.labels or [])), "problem_type": "single_label_classification"}

    def metrics(self, examples: Examples, predictions: np.ndarray, label_ids: np.ndarray) -> dict[str, float]:
        """Returns the metrics of logits [n, C], C = 1 for numbers. Raises ImportError without scikit-learn."""
        try:
            from scipy import stats  # type: ignore[import-untyped]
            from sklearn import metrics
        except ImportError as error:
            raise ImportError(f"metrics need scikit-learn: pip install bert_fast[train] ({error})") from None
        if not self.is_regression:
            answers = predictions.argmax(axis=-1)
            average = "binary" if predictions.shape[-1] == 2 else "macro"
            return {
                "accuracy": float(metrics.accuracy_score(label_ids, answers)),
                "f1": float(metrics.f1_score(label_ids, answers, average=average, zero_division=0.0)),
                "matthews_correlation": float(metrics.matthews_corrcoef(label_ids, answers)),
            }
        numbers, answers = label_ids.astype(np.float64), predictions[:, 0].astype(np.float64)
        are_same = np.ptp(numbers) == 0 or np.ptp(answers) == 0  # then no correlation is defined
        return {
            "pearson": 0.0 if are_same else float(stats.pearsonr(numbers, answers).statistic),
            "spearman": 0.0 if are_same else float(stats.spearmanr(numbers, answers).statistic),
            "mse": float(metrics.mean_squared_error(numbers, answers)),
        }

    def rows(self, examples: Examples, predictions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yields label, gold (where it is known), probabilities (of classes) and the texts of every example."""
        is_number, names = self.is_regression, self.labels or []
        said = {"label": predictions[:, 0] if is_number else predictions.argmax(axis=-1)}
        if examples.labels:
            said["gold"] = examples.labels["labels"]
        shares = torch.from_numpy(predictions).double().softmax(dim=-1).tolist()
        texts = {column: column_values(examples.rows, column) for column in self._text_columns()}
        for index, row in enumerate(examples.row_of.tolist()):
            answer = {key: values[index].item() if is_number else names[values[index]] for key, values in said.items()}
            if not is_number:
                answer["probabilities"] = dict(zip(names, shares[index], strict=True))
            yield answer | {column: values[row] for column, values in texts.items()}

    def _text_columns(self) -> list[str]:
        pair = self.arguments.text_pair_column_name
        return [self.arguments.text_column_name, *([] if pair is None else [pair])]

    def _classes(self, data: Any, values: list[Any]) -> np.ndarray:
        """The number of every example's class: int64 [n]."""
        column = self.arguments.label_column_name
        for row, value in enumerate(values):
            if not isinstance(value, str | int) or not str(value).strip():
                hint = " (do_regression: labels are numbers)" if isinstance(value, float) else ""
                raise value_error(data, row, column, f"expected a string or a whole number, got {value!r}{hint}")
        labels = list(map(str, values))
        if self.labels is None:
            found = set(labels)
            if len(found) < 2:
                raise value_error(data, 0, column, f"expected at least two labels, got {labels[0]!r} in all rows")
            are_numbers = all(name.isascii() and name.removeprefix("-").isdecimal() for name in found)
            self.labels = sorted(found, key=(lambda name: (int(name), name)) if are_numbers else None)
        numbers = {name: number for number, name in enumerate(self.labels)}
        for row, name in enumerate(labels):
            if name not in numbers:
                expected = f"expected one of the labels {reprlib.repr(self.labels)}"
                raise value_error(data, row, column, f"{expected}, got {name!r}")
        return np.array([numbers[name] for name in labels], dtype=np.int64)

    def _numbers(self, data: Any, values: list[Any]) -> np.ndarray:
        """Every example's number: fp32 [n]."""
        numbers = np.array([table_number(value) for value in values], dtype=np.float32)
        if np.isnan(numbers).any():
            row = int(np.isnan(numbers).argmax())
            raise value_error(data, row, self.arguments.label_column_name, f"expected a number, got {values[row]!r}")
        return numbers
