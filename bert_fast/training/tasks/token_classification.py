"""A label for every word, such as named entities or parts of speech: the first token of a word carries its label.

words     Johnson       lives  in  U+200B  Oslo     (a space of width 0, of which no token is left)
labels    B-PER         O      O   O       B-LOC
tokens    [CLS]  john   ##son  lives  in   oslo   [SEP]
labels    -100   B-PER  -100   O      O    B-LOC  -100
"""

import os
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np

from bert_fast.checks import check_count
from bert_fast.data.conll import read_conll
from bert_fast.data.examples import Examples
from bert_fast.data.files import column_values, read_rows, value_error
from bert_fast.data.records import JSON_LINES, ending_of
from bert_fast.data.sequences import Sequences
from bert_fast.errors import SourceError
from bert_fast.models import BertForTokenClassification
from bert_fast.training.tasks.task import Task, TaskArguments

_IGNORED = -100
_ENTITY_LABEL = re.compile(r"O|[BIES]-.+", re.DOTALL)


@dataclass
class TokenClassificationArguments(TaskArguments):
    """Words that each have a label: CoNLL columns, or JSON lines or Parquet with lists of words and labels."""

    text_column_name: str = field(default="tokens", metadata={"help": "Column of the lists of words."})
    label_column_name: str = field(default="ner_tags", metadata={"help": "Column of the lists of labels."})
    word_column: int = field(default=0, metadata={"help": "CoNLL column of the words, from 0."})
    label_column: int = field(default=-1, metadata={"help": "CoNLL column of the labels; -1 is the last."})
    max_seq_length: int = field(
        default=256, metadata={"help": "Most tokens; longer sentences become several examples."}
    )

    def __post_init__(self) -> None:
        check_count("max_seq_length", self.max_seq_length, 3)  # two are special


class TokenClassification(Task):
    """Gives each word of a sentence a label, as for names (`BertForTokenClassification`).

    Metrics: accuracy, the share of words with the right label. Where all labels are O, B-x, I-x (or E-x, S-x), also
    precision, recall and f1 of whole entities by seqeval: one is right if its first word, its last word and its type
    are. All words count: one of which no token is left has the answer "O".

    Labels that are not given are sorted by what follows "B-" and the like, "O" first.
    """

    Arguments = TokenClassificationArguments
    model_class = BertForTokenClassification

    @property
    def metric_for_best_model(self) -> str:
        """f1 of entities, accuracy of other labels."""
        return "f1" if all(map(_ENTITY_LABEL.fullmatch, self.labels or [])) else "accuracy"

    def read(self, data: Any, is_labelled: bool = True) -> Examples:
        """Returns the examples of a file, a `datasets.Dataset` or a list of mappings.

        A sentence of more than max_seq_length tokens becomes several examples, divided between words. Of a word that is
        longer by itself only the first tokens are kept.

        Raises:
            OSError, SourceError: see `read_conll` and `read_rows`; words or labels are no lists of strings, or a label
                is not among `labels`. The message names file and line.
        """
        rows, form = self._rows(data, is_labelled), self.tokenizer.form
        room = self.arguments.max_seq_length - form.num_special(False)
        words = [*chain.from_iterable(row["tokens"] for row in rows)]
        tokens = self.tokenizer.encode_ragged(words, add_special_tokens=False)
        ends = tokens.cu_seqlens
        row_of, starts = _divide(np.diff(ends).tolist(), [len(row["tokens"]) for row in rows], room)
        stops = np.append(starts[1:], len(words))
        lengths = np.minimum(ends[stops] - ends[starts], room)
        joined = form.join(tokens.ids, ends[starts][:, None], lengths[:, None], dtype=np.int32)
        shifts = np.repeat(joined.boundaries[:-1] + 1 - ends[starts], stops - starts)  # of tokens to their new place
        has_token = np.diff(ends) > 0
        word_of = np.full(len(joined.ids), -1)  # the word of which a token is the first
        word_of[(ends[:-1] + shifts)[has_token]] = np.flatnonzero(has_token)
        labels = {"labels": np.append(self._numbers(data, rows), _IGNORED)[word_of]} if is_labelled else {}
        sequences, details = Sequences.of(joined), {"word_of": word_of}
        return Examples(sequences, labels, 1, rows, row_of, details, per_token=("labels", "word_of"))

    def config(self) -> dict[str, Any]:
        """See `Task.config`."""
        return {"id2label": dict(enumerate(self.labels or []))}

    def metrics(self, examples: Examples, predictions: np.ndarray, label_ids: np.ndarray) -> dict[str, float]:
        """Returns the metrics of logits [T, C], those of all tokens. Raises ImportError without seqeval."""
        try:
            from seqeval.metrics.sequence_labeling import accuracy_score, precision_recall_fscore_support
        except ImportError as error:
            raise ImportError(f"metrics of words need seqeval: pip install bert_fast[train] ({error})") from None
        pairs = [(row["gold"], row["labels"]) for row in self.rows(examples, predictions)]
        gold, found = map(list, zip(*pairs, strict=True))
        metrics = {"accuracy": float(accuracy_score(gold, found))}
        if self.metric_for_best_model == "accuracy":
            return metrics
        precision, recall, f1, _ = precision_recall_fscore_support(gold, found, average="micro", zero_division=0)
        return metrics | {"precision": float(precision), "recall": float(recall), "f1": float(f1)}

    def rows(self, examples: Examples, predictions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yields tokens (words), labels (the model's) and gold (where they are known) of every sentence."""
        names, word_of = self.labels or [], examples.details["word_of"]
        ends = np.cumsum([0, *(len(row["tokens"]) for row in examples.rows)])
        answers = np.full(ends[-1], names.index("O") if "O" in names else 0)
        answers[word_of[word_of >= 0]] = predictions.argmax(axis=-1)[word_of >= 0]
        for index in np.unique(examples.row_of).tolist():
            row = examples.rows[index]
            labels = [names[answer] for answer in answers[ends[index] : ends[index + 1]].tolist()]
            yield {"tokens": row["tokens"], "labels": labels} | ({"gold": row["labels"]} if examples.labels else {})

    def _rows(self, data: Any, is_labelled: bool) -> list[dict[str, list[Any]]]:
        """Tokens, labels where there are any, and lines of a CoNLL file, sentence by sentence."""
        if isinstance(data, str | os.PathLike) and ending_of(os.fspath(data)) not in (*JSON_LINES, ".parquet"):
            label_column = self.arguments.label_column if is_labelled else None
            return read_conll(data, word_column=self.arguments.word_column, label_column=label_column)
        names = [self.arguments.text_column_name, *([self.arguments.label_column_name] if is_labelled else [])]
        found = read_rows(data, names)
        lists = [column_values(found, name) for name in names]
        for name, values in zip(names, lists, strict=True):
            for row, value in enumerate(values):
                if not (isinstance(value, list) and len(value) == len(lists[0][row]) and {*map(type, value)} <= {str}):
                    problem = f"expected a list of strings, one for each word, got {reprlib.repr(value)}"
                    raise value_error(data, row, name, problem)
        return [dict(zip(("tokens", "labels"), row, strict=False)) for row in zip(*lists, strict=True)]

    def _numbers(self, data: Any, rows: list[dict[str, list[Any]]]) -> np.ndarray:
        """The number of every word's label: int64 [W]."""
        labels = [*chain.from_iterable(row["labels"] for row in rows)]
        if self.labels is None:
            self.labels = sorted(set(labels), key=lambda name: (name != "O", re.sub("^.-", "", name), name))
        numbers = {name: number for number, name in enumerate(self.labels)}
        if unknown := set(labels) - numbers.keys():
            row, label = next(
                (row, label) for row, one in enumerate(rows) for label in one["labels"] if label in unknown
            )
            problem = f"expected one of {', '.join(map(repr, self.labels))}, got {label!r}"
            if "lines" not in rows[row]:
                raise value_error(data, row, self.arguments.label_column_name, problem)
            line = rows[row]["lines"][rows[row]["labels"].index(label)]
            raise SourceError(f"{os.fspath(data)}: line {line}: {problem}")
        return np.array([numbers[label] for label in labels], dtype=np.int64)


def _divide(sizes: list[int], counts: list[int], room: int) -> tuple[np.ndarray, np.ndarray]:
    """The sentence of every example, and the number of its first word: int64 [n] each.

    sizes: tokens of every word. counts: words of every sentence. room: most tokens of an example; a word that has more
    stands alone.
    """
    row_of, starts = list[int](), list[int]()
    for row, (first, end) in enumerate(pairwise([0, *np.cumsum(counts).tolist()])):
        row_of.append(row)
        starts.append(first)
        used = 0
        for word in range(first, end):
            if used + sizes[word] > room and word > starts[-1]:
                row_of.append(row)
                starts.append(word)
                used = 0
            used += sizes[word]
    return np.array(row_of), np.array(starts)
