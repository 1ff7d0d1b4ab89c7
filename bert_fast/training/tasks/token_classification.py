"""The task ner: a label for every word, such as named entities or parts of speech."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from bert_fast.data.batches import Source
from bert_fast.data.token_classification import TokenClassificationSource
from bert_fast.models import BertForTokenClassification, BertPreTrainedModel
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training.task import Predictions, Task
from bert_fast.training.tasks.base import FinetuneSettings, check_sources, label_names, source_of_kind

__all__ = ["NerSettings", "TokenClassificationTask"]

_BREAKS = str.maketrans("\t\n\r", "   ")  # within words and labels of rows; columns have no quoting
_ENTITY_LABEL = re.compile(r"O|[BIES]-.+", re.DOTALL)


@dataclass(frozen=True)
class NerSettings(FinetuneSettings):
    """Words in columns, each with a tag (B-PER, I-PER, O)."""

    summary: ClassVar[str] = "a tag for every word, such as names of persons and places: CoNLL columns"

    train: str  # CoNLL columns
    valid: str | None = None  # the same, to judge by
    word_column: int = 0  # from 0
    label_column: int | None = -1  # from 0; -1 is the last
    labels: tuple[str, ...] | None = None  # all tags, in the order of their numbers; default: those in train
    max_length: int = 256  # tokens; longer sentences become several examples
    truncate: bool = False  # longer sentences lose their end instead

    @property
    def model_class(self) -> type[BertPreTrainedModel]:
        """See `TaskSettings.model_class`."""
        return BertForTokenClassification

    def make_task(self, train: Any, valid: Any) -> "TokenClassificationTask":
        """See `TaskSettings.make_task`."""
        return TokenClassificationTask(train, valid)

    def read(
        self,
        examples: Any,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str] | None = None,
        is_labelled: bool = True,
        cache_dir: Path | None = None,
    ) -> TokenClassificationSource:
        """See `TaskSettings.read`; tokens are made anew every time."""
        columns: dict[str, Any] = {}
        if isinstance(examples, str | os.PathLike):
            columns = {"word_column": self.word_column, "label_column": self.label_column if is_labelled else None}
        elif not is_labelled:
            columns = {"label_column": None}
        return TokenClassificationSource.read(
            examples,
            tokenizer,
            labels=self.labels if labels is None else labels,
            max_length=self.max_length,
            truncate=self.truncate,
            **columns,
        )

    def parse_line(self, line: str, number: int) -> dict[str, Any]:
        """See `TaskSettings.parse_line`: words with spaces between them."""
        return {"tokens": line.split()}

    def label_names(self, id2label: Mapping[int, str], file: Path) -> list[str] | None:
        """See `TaskSettings.label_names`."""
        return label_names(id2label, self.labels, file)


class TokenClassificationTask(Task):
    """A label for every word, by a `BertForTokenClassification`: named entities, parts of speech.

    Metrics: accuracy, the share of words with the right label. Where all labels are O, B-x, I-x (or E-x, S-x), also
    precision, recall and f1 of whole entities, as the script conlleval of CoNLL-2000 counts them: one is right if its
    first word, its last word and its type are (Tjong Kim Sang and De Meulder 2003, arXiv:cs/0306050). The best
    checkpoint is then that of the greatest f1, otherwise the most accurate one.

    All words count, also those that a model never saw: those of which tokenization leaves nothing, and those cut off.

    Args:
        train: see `Task`.
        valid: likewise; its label names must be those of `train`.

    Raises:
        ValueError: the two do not have the same label names.
    """

    name = "ner"
    metric = "f1"
    higher_is_better = True

    def __init__(
        self, train: TokenClassificationSource | None = None, valid: TokenClassificationSource | None = None
    ) -> None:
        check_sources(TokenClassificationSource, train=train, valid=valid)
        self.train, self.valid = train, valid
        self._label_names = [source.label_names for source in (train, valid) if source is not None]
        if self._label_names and self._label_names[0] != self._label_names[-1]:
            raise ValueError(f"valid: expected the labels of train, {self._label_names[0]}, got {self._label_names[1]}")
        if self._label_names and not _are_of_entities(self._label_names[0]):
            self.metric = "accuracy"

    def model_config(self) -> dict[str, Any]:
        """The entries of a `BertConfig` that the task decides: the names of the labels.

        Raises:
            ValueError: there are no examples that would name them.
        """
        if not self._label_names:
            raise ValueError("train: expected labelled examples, got none")
        return {"id2label": dict(enumerate(self._label_names[0]))}

    def label_counts(self, batch: PackedBatch) -> dict[str, int]:
        """See `Task.label_counts`: labelled words."""
        return {"loss": int((batch["labels"] >= 0).sum())} if "labels" in batch else {}

    def predict(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See `Task.predict`: labels (int64 [T]), the most probable one of every token."""
        output = model(**batch)
        return {} if output.loss is None else {"loss": output.loss}, {"labels": output.logits.argmax(dim=-1)}

    def score(self, source: Source, predictions: Predictions) -> dict[str, float]:
        """See `Task.score`; entities are found by seqeval.

        Raises:
            ImportError: seqeval is not installed.
            ValueError: the examples have no labels.
        """
        source = source_of_kind(TokenClassificationSource, source)
        gold, found = source.true_word_labels(), _word_labels(source, predictions)
        if gold is None:
            raise ValueError("source: expected examples with labels, got none")
        metrics = {"accuracy": float((gold == found).mean()) if len(gold) else 0.0}
        if not _are_of_entities(source.label_names):
            return metrics
        return _entity_metrics(_by_sentence(source, gold), _by_sentence(source, found)) | metrics

    def rows(self, source: Source, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """What the model says, sentence by sentence.

        Yields:
            words, labels (its answers), gold (the right ones, where they are known): a list of strings each.
        """
        source = source_of_kind(TokenClassificationSource, source)
        words, ends = source.sentences.words, source.sentences.boundaries.tolist()
        gold, found = source.true_word_labels(), _by_sentence(source, _word_labels(source, predictions))
        right = None if gold is None else _by_sentence(source, gold)
        for index, (start, stop) in enumerate(pairwise(ends)):
            row = {"words": words[start:stop], "labels": found[index]}
            yield row if right is None else row | {"gold": right[index]}

    def conll(self, source: Source, predictions: Predictions) -> Iterator[str]:
        """`rows` in CoNLL columns, separated by tabs: word, right label where it is known, the model's label.

        Yields:
            lines without their ends, an empty one behind every sentence.
        """
        for row in self.rows(source, predictions):
            columns = [row[name] for name in ("words", "gold", "labels") if name in row]
            for texts in zip(*columns, strict=True):
                yield "\t".join(text.translate(_BREAKS) for text in texts)
            yield ""

    def write_predictions(self, path: Path, source: Source, predictions: Predictions) -> list[Path]:
        """Writes `conll` as path.conll."""
        file = path.with_name(f"{path.name}.conll")
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "w", encoding="utf-8", newline="\n") as opened:
            opened.writelines(f"{line}\n" for line in self.conll(source, predictions))
        return [file]

    def describe(self, source: Source, index: int) -> str:
        """See `Task.describe`."""
        return source_of_kind(TokenClassificationSource, source).decode(index)


def _are_of_entities(names: list[str]) -> bool:
    return all(_ENTITY_LABEL.fullmatch(name) for name in names)


def _word_labels(source: TokenClassificationSource, predictions: Predictions) -> np.ndarray:
    return source.word_labels(predictions.tokens("labels")[0])


def _by_sentence(source: TokenClassificationSource, labels: np.ndarray) -> list[list[str]]:
    names, ends = [source.label_names[label] for label in labels.tolist()], source.sentences.boundaries.tolist()
    return [names[start:stop] for start, stop in pairwise(ends)]


def _entity_metrics(gold: list[list[str]], found: list[list[str]]) -> dict[str, float]:
    try:
        from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
    except ImportError as error:
        raise ImportError(f"metrics of entities need seqeval: pip install bert_fast[train] ({error})") from None
    names = ("precision", "recall", "f1")
    values = precision_recall_fscore_support(gold, found, average="micro", zero_division=0)
    return {name: float(value) for name, value in zip(names, values, strict=False)}
