"""The task classify: a class, or a number, for a text or a pair of texts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from bert_fast.data.batches import Batches, Source
from bert_fast.data.classification import ClassificationSource
from bert_fast.models import BertConfig, BertForSequenceClassification, BertPreTrainedModel
from bert_fast.numerals import table_number
from bert_fast.tokenization import Tokenizer
from bert_fast.training.correlation import correlations
from bert_fast.training.task import Predictions, Task
from bert_fast.training.tasks.base import (
    FinetuneSettings,
    check_sources,
    label_names,
    probabilities,
    source_of_kind,
    write_table,
)

__all__ = ["ClassificationTask", "ClassifySettings"]


@dataclass(frozen=True)
class ClassifySettings(FinetuneSettings):
    """Texts, or pairs of texts, each with a label or a number."""

    summary: ClassVar[str] = "a class, or a number, for a text or a pair of texts: TSV, CSV, JSON lines, Parquet"

    train: str  # TSV, CSV, JSON lines or Parquet
    valid: str | None = None  # the same, to judge by
    valid_share: float | None = None  # without valid: share of train, at random, kept to judge by
    text: str = "text"  # column; of a file without a header its number, from 0
    text_pair: str | None = None  # column of a second text
    label: str = "label"  # column
    labels: tuple[str, ...] | None = None  # all labels, in the order of their numbers; default: those in train, sorted
    regression: bool = False  # labels are numbers to come close to
    max_length: int = 128  # tokens; longer texts are cut

    @property
    def model_class(self) -> type[BertPreTrainedModel]:
        """See `TaskSettings.model_class`."""
        return BertForSequenceClassification

    def make_task(self, train: Any, valid: Any) -> "ClassificationTask":
        """See `TaskSettings.make_task`."""
        return ClassificationTask(train, valid)

    def read(
        self,
        examples: Any,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str] | None = None,
        is_labelled: bool = True,
        cache_dir: Path | None = None,
    ) -> ClassificationSource:
        """See `TaskSettings.read`."""
        return ClassificationSource.read(
            examples,
            tokenizer,
            text=self.text,
            text_pair=self.text_pair,
            label=self.label if is_labelled else None,
            labels=self.labels if labels is None else labels,
            regression=self.regression,
            max_length=self.max_length,
            cache_dir=cache_dir,
        )

    def parse_line(self, line: str, number: int) -> dict[str, Any]:
        """See `TaskSettings.parse_line`: a text; of pairs two, with a tab between them."""
        if self.text_pair is None:
            return {self.text: line}
        parts = line.split("\t")
        if len(parts) != 2:
            raise ValueError(f"expected two texts with a tab between them, got {len(parts)}")
        return {self.text: parts[0], self.text_pair: parts[1]}

    def label_names(self, id2label: Mapping[int, str], file: Path) -> list[str] | None:
        """See `TaskSettings.label_names`: None for numbers."""
        return None if self.regression else label_names(id2label, self.labels, file)

    @classmethod
    def of_model(cls, config: BertConfig) -> dict[str, Any]:
        """See `TaskSettings.of_model`: whether labels are numbers."""
        return {"regression": True} if getattr(config, "problem_type", None) == "regression" else {}


class ClassificationTask(Task):
    """A class, or a number, for a text or a pair of texts, by a `BertForSequenceClassification`.

    Metrics of classes: accuracy; f1 (of two classes: that of the second one, label_names[1]; of more: the mean over
    classes, "macro"); matthews_correlation. The best checkpoint is the most accurate one.
    Metrics of numbers: pearson, spearman (0 where all predictions, or all labels, are the same), mse. The best
    checkpoint is that of the greatest pearson.

    Args:
        train: see `Task`.
        valid: likewise; its classes must be those of `train`.

    Raises:
        ValueError: the two do not have the same classes.
    """

    train: ClassificationSource | None
    valid: ClassificationSource | None
    name = "classify"
    metric = "accuracy"
    higher_is_better = True
    falling = ("loss", "mse")

    def __init__(self, train: ClassificationSource | None = None, valid: ClassificationSource | None = None) -> None:
        check_sources(ClassificationSource, train=train, valid=valid)
        self.train, self.valid = train, valid
        sources = [source for source in (train, valid) if source is not None]
        if len(sources) == 2 and _kind(sources[0]) != _kind(sources[1]):
            raise ValueError(f"valid: expected labels as in train, {_kind(sources[0])}, got {_kind(sources[1])}")
        if sources and sources[0].is_regression:
            self.metric = "pearson"

    def model_config(self) -> dict[str, Any]:
        """The entries of a `BertConfig` that the task decides: the names of the classes, and what the labels are.

        Raises:
            ValueError: there are no labelled examples.
        """
        source = self.train or self.valid
        if source is not None and source.is_regression:
            return {"num_labels": 1, "problem_type": "regression"}
        if source is None or not source.label_names:
            raise ValueError("train: expected labelled examples, got none")
        return {"id2label": dict(enumerate(source.label_names)), "problem_type": "single_label_classification"}

    def notes(self, batches: Batches) -> list[str]:
        """See `Task.notes`; also classes that are numbers with decimals, as of a rating, in a file of texts."""
        names, notes = self.class_names(), super().notes(batches)
        decimals = [name for name in names if "." in name]
        if decimals and not any(math.isnan(table_number(name)) for name in names):
            notes.append(
                f"labels: the names of all {len(names):,} classes are numbers, such as {decimals[0]!r}; with "
                "regression the model learns to come close to them"
            )
        return notes

    def predict(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See `Task.predict`: logits (fp32 [B, number of classes], or [B, 1])."""
        output = model(**batch)
        return {} if output.loss is None else {"loss": output.loss}, {"logits": output.logits.float()}

    def score(self, source: Source, predictions: Predictions) -> dict[str, float]:
        """See `Task.score`; the metrics are those of scikit-learn and SciPy.

        Raises:
            ImportError: scikit-learn is not installed.
            ValueError: the examples have no labels.
        """
        source = source_of_kind(ClassificationSource, source)
        logits, labels = predictions.rows("logits"), source.labels
        if labels is None:
            raise ValueError("source: expected examples with labels, got none")
        if source.is_regression:
            return _number_metrics(labels, logits[:, 0])
        return _class_metrics(labels, logits.argmax(axis=1), binary=logits.shape[1] == 2)

    def rows(self, source: Source, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """What the model says, example by example.

        Yields:
            index; label (its answer: a name, or a number); gold (the right one, where it is known); probability_<name>
            for every class; text; text_pair, where there are pairs.
        """
        source = source_of_kind(ClassificationSource, source)
        logits = predictions.rows("logits")
        names = source.label_names or [f"LABEL_{number}" for number in range(logits.shape[1])]
        shares = probabilities(logits)
        answers = logits[:, 0].tolist() if source.is_regression else [names[k] for k in logits.argmax(axis=1)]
        gold: list[Any] | None = None
        if source.labels is not None:
            gold = source.labels.tolist()
            gold = gold if source.is_regression else [names[number] for number in gold]
        for index, (answer, text) in enumerate(zip(answers, source.texts, strict=True)):
            row = {"index": index, "label": answer}
            if gold is not None:
                row["gold"] = gold[index]
            if not source.is_regression:
                row |= {f"probability_{name}": share for name, share in zip(names, shares[index].tolist(), strict=True)}
            row["text"] = text
            if source.pairs is not None:
                row["text_pair"] = source.pairs[index]
            yield row

    def write_predictions(self, path: Path, source: Source, predictions: Predictions) -> list[Path]:
        """Writes `rows` as a table: path.tsv."""
        file = path.with_name(f"{path.name}.tsv")
        write_table(file, self.rows(source, predictions))
        return [file]

    def describe(self, source: Source, index: int) -> str:
        """See `Task.describe`."""
        return source_of_kind(ClassificationSource, source).decode(index)


def _kind(source: ClassificationSource) -> str:
    return "numbers" if source.is_regression else f"classes {source.label_names}"


def _class_metrics(labels: np.ndarray, answers: np.ndarray, binary: bool) -> dict[str, float]:
    try:
        from sklearn import metrics
    except ImportError as error:
        raise ImportError(f"metrics need scikit-learn: pip install bert_fast[train] ({error})") from None
    average = "binary" if binary else "macro"
    return {
        "accuracy": float(metrics.accuracy_score(labels, answers)),
        "f1": float(metrics.f1_score(labels, answers, average=average, zero_division=0.0)),
        "matthews_correlation": float(metrics.matthews_corrcoef(labels, answers)),
    }


def _number_metrics(labels: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    errors = labels.astype(np.float64) - answers.astype(np.float64)
    return correlations(labels, answers) | {"mse": float((errors**2).mean())}
