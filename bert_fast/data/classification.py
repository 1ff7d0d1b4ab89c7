"""Texts, or pairs of texts, with a class or a number each."""

import dataclasses
import math
import numbers
import os
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_fast.checks import check_flag
from bert_fast.data.arguments import (
    check_column,
    check_tokenizer_kind,
    optional_folder,
    optional_length,
    row_index,
    row_indices,
    texts_of,
)
from bert_fast.data.digests import data_digest
from bert_fast.data.sequences import Sequences
from bert_fast.data.tables import Table, label_problem, read_table
from bert_fast.errors import SourceError
from bert_fast.numerals import table_number
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch

__all__ = ["ClassificationSource"]

_SHOWN_LABELS = 20  # in a message


@dataclass(frozen=True)
class ClassificationSource:
    """Texts, or pairs of texts, with a class or a number each: a `Source`, the same in every epoch.

    It is a data set of single examples, too: `len(source)`, and `source[i]` with input_ids and token_type_ids (int64
    [S]) and label, as `PackedCollator` joins them.

    Attributes:
        tokenizer: made the tokens.
        texts, pairs: first texts, second texts (None: there are none), as they were read.
        sequences: their tokens.
        label_names: of the classes 0, 1, ...; empty where the labels are numbers, or not known.
        labels (int64 [n], fp32 [n] for numbers, or None): of every example.
        is_regression: whether labels are numbers.
    """

    tokenizer: Tokenizer
    texts: list[str]
    pairs: list[str] | None
    sequences: Sequences
    label_names: list[str]
    labels: np.ndarray | None
    is_regression: bool = False

    @classmethod
    def read(
        cls,
        source: Any,
        tokenizer: Tokenizer,
        *,
        text: str = "text",
        text_pair: str | None = None,
        label: str | None = "label",
        labels: Sequence[str] | None = None,
        regression: bool = False,
        max_length: int | None = 128,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> "ClassificationSource":
        """Reads and tokenizes a table.

        Args:
            source: a file, a `datasets.Dataset` or a list of mappings: see `bert_fast.data.tables`.
            tokenizer: as the model's.
            text: the column of texts.
            text_pair: the column of second texts.
            label: the column of labels; None: the examples have none.
            labels: all labels, in the order of their numbers, as those of the training data are
                (`train.label_names`); None: those that occur, sorted (as numbers if all are whole numbers).
            regression: labels are numbers to come close to, no classes.
            max_length: greatest number of tokens; of a pair, the longer text is cut first. None: nothing is cut.
            cache_dir: where tokens are kept from one run to the next; None: nowhere.

        Raises:
            SourceError: the table cannot be read, a text is no string, a label is missing, empty, not Unicode, no
                number, or not among `labels`, or all examples have the same one.
            OSError, TypeError, ValueError: see `read_table` and `Sequences.cached`.
        """
        check_tokenizer_kind(tokenizer)
        check_column("text", text)
        check_column("text_pair", text_pair, is_optional=True)
        check_column("label", label, is_optional=True)
        check_flag("regression", regression)
        max_length, cache_dir = optional_length("max_length", max_length), optional_folder("cache_dir", cache_dir)
        if regression and labels is not None:
            raise ValueError(f"labels: expected None with regression=True, got {reprlib.repr(labels)}")
        names = [] if labels is None else _checked_names(labels)
        columns = [column for column in (text, text_pair, label) if column is not None]
        table = read_table(source, columns)
        texts, pairs = table.texts(text), None if text_pair is None else table.texts(text_pair)
        values: np.ndarray | None = None
        if label is not None and regression:
            values = _numbers(table, label)
        elif label is not None:
            names, values = _classes(table, label, names)
        sequences = Sequences.cached(cache_dir, tokenizer, texts, pairs, max_length)
        return cls(tokenizer, texts, pairs, sequences, names, values, regression)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = row_index(index, len(self))
        example: dict[str, Any] = dict(self.sequences[index])
        return example if self.labels is None else example | {"label": self.labels[index].item()}

    def lengths(self, epoch: int) -> np.ndarray:
        """Tokens of every example: int32 [n]."""
        return self.sequences.lengths

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        """See `Source.batch`; labels (int64 [B], fp32 for numbers) are there where the examples have them."""
        indices = row_indices(indices, len(self))
        return self.sequences.gather(indices, **({} if self.labels is None else {"labels": self.labels[indices]}))

    def digest(self) -> str:
        """See `source_digest`."""
        return data_digest(*self.sequences.arrays().values(), self.labels)

    def take(self, indices: np.ndarray) -> "ClassificationSource":
        """A source of some of the examples (int [m]), in this order."""
        indices = row_indices(indices, len(self))
        return dataclasses.replace(
            self,
            texts=[self.texts[index] for index in indices],
            pairs=None if self.pairs is None else [self.pairs[index] for index in indices],
            sequences=self.sequences.take(indices),
            labels=None if self.labels is None else self.labels[indices],
        )

    def decode(self, index: int) -> str:
        """An example as text: its tokens, "->", its label."""
        index = row_index(index, len(self))
        tokens = " ".join(self.tokenizer.convert_ids_to_tokens(self.sequences[index]["input_ids"].tolist()))
        if self.labels is None:
            return tokens
        label = self.labels[index]
        return f"{tokens} -> {label:g}" if self.is_regression else f"{tokens} -> {self.label_names[label]}"


def _checked_names(labels: Sequence[str]) -> list[str]:
    names = texts_of("labels", labels)
    if len(set(names)) < max(2, len(names)):
        raise ValueError(f"labels: expected at least two different ones, each once, got {names}")
    return names


def _classes(table: Table, column: str, names: list[str]) -> tuple[list[str], np.ndarray]:
    """(the names of the classes, the number of every row's class: int64 [n])."""
    values = table.values(column)
    for row, value in enumerate(values):
        if not isinstance(value, str | numbers.Integral):
            hint = "; are labels numbers to come close to (regression=True)?" if isinstance(value, float) else ""
            raise SourceError(
                f"{table.place(row)}: column {column!r}: expected a label (a string or a whole number), got "
                f"{value!r}{hint}"
            )
    labels = list(map(str, values))
    found = set(labels)
    if wrong := {label: problem for label in found if (problem := label_problem(label))}:
        row = next(row for row, label in enumerate(labels) if label in wrong)
        raise SourceError(f"{table.place(row)}: column {column!r}: {wrong[labels[row]]}")
    if not names:
        names = sorted(found, key=_sort_key(found))
        if len(names) < 2:
            raise SourceError(f"{table.name}: column {column!r}: expected at least two labels, got only {names[0]!r}")
    number_of = {name: number for number, name in enumerate(names)}
    if found - number_of.keys():
        row = next(row for row, label in enumerate(labels) if label not in number_of)
        known = ", ".join(map(repr, names[:_SHOWN_LABELS])) + (", ..." if len(names) > _SHOWN_LABELS else "")
        raise SourceError(f"{table.place(row)}: expected one of the labels {known}, got {labels[row]!r}")
    return names, np.array([number_of[label] for label in labels], dtype=np.int64)


def _sort_key(names: Any) -> Any:
    """Whole numbers are sorted as such, so that 10 comes after 9."""
    are_numbers = all(name.removeprefix("-").isdecimal() and name.isascii() for name in names)
    return (lambda name: (int(name), name)) if are_numbers else None


def _numbers(table: Table, column: str) -> np.ndarray:
    """Every row's number: fp32 [n]."""
    found = []
    for row, value in enumerate(table.values(column)):
        number = table_number(value)
        if math.isnan(number):
            raise SourceError(f"{table.place(row)}: column {column!r}: expected a number, got {value!r}")
        found.append(number)
    return np.array(found, dtype=np.float32)
