"""Questions with several answers to choose from: SWAG, COPA, and tables like theirs.

Every choice is a sequence of its own, with what it belongs to; the columns say which:

    sent1, sent2, ending0, ending1, ...     [CLS] sent1 [SEP] sent2 ending [SEP]
    premise, question, choice1, choice2     [CLS] premise [SEP] choice [SEP]    where the question is "effect"
                                            [CLS] choice [SEP] premise [SEP]    where it is "cause"

Cause and effect stand in the order in which they happen, so that no words of any language have to be put between them.
"""

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from bert_fast.data.arguments import (
    check_column,
    check_tokenizer_kind,
    optional_folder,
    optional_length,
    row_index,
    row_indices,
)
from bert_fast.data.digests import data_digest
from bert_fast.data.sequences import Sequences
from bert_fast.data.tables import Table, read_table
from bert_fast.errors import SourceError
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch

__all__ = ["MultipleChoiceSource"]


@dataclass(frozen=True)
class MultipleChoiceSource:
    """Questions with C choices each: a `Source`, the same in every epoch, whose examples are C sequences.

    `len(source)` is the number of questions. Batches hold num_choices (int), too, as `BertForMultipleChoice` wants it
    beside packed input, and labels (int64 [B]) where the right choices are known.

    Attributes:
        tokenizer: made the tokens.
        contexts: what the choices of each question belong to, for people.
        choices: C lists, the first choices of all questions, the second ones, ...
        sequences: the choices of question 0, of question 1, ...: n * C sequences.
        labels (int64 [n] or None): the right choices, from 0.
    """

    tokenizer: Tokenizer
    contexts: list[str]
    choices: list[list[str]]
    sequences: Sequences
    labels: np.ndarray | None

    @classmethod
    def read(
        cls,
        source: Any,
        tokenizer: Tokenizer,
        *,
        label: str | None = "label",
        max_length: int | None = 128,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> "MultipleChoiceSource":
        """Reads and tokenizes a table.

        Args:
            source: a file, a `datasets.Dataset` or a list of mappings: see `bert_fast.data.tables`.
            tokenizer: as the model's.
            label: the column of right choices: their numbers, from 0, or the names of their columns; None: they are not
                known.
            max_length: greatest number of tokens of a choice with what it belongs to; the longer of the two texts is
                cut first. None: nothing is cut.
            cache_dir: where tokens are kept from one run to the next; None: nowhere.

        Raises:
            SourceError: the table cannot be read, has neither set of columns, a text is no string, a question is
                neither "cause" nor "effect", a label is no number of a choice.
            OSError, TypeError, ValueError: see `read_table` and `Sequences.cached`.
        """
        check_tokenizer_kind(tokenizer)
        check_column("label", label, is_optional=True)
        max_length, cache_dir = optional_length("max_length", max_length), optional_folder("cache_dir", cache_dir)
        table = read_table(source, [] if label is None else [label])
        questions = _questions(table)
        right = None if label is None else _labels(table, label, questions.columns)
        texts, pairs = [first for first, _ in questions.pairs], [second for _, second in questions.pairs]
        sequences = Sequences.cached(cache_dir, tokenizer, texts, pairs, max_length)
        return cls(tokenizer, questions.contexts, questions.choices, sequences, right)

    @property
    def num_choices(self) -> int:
        """C: how many choices every question has."""
        return len(self.choices)

    def __len__(self) -> int:
        return len(self.contexts)

    def lengths(self, epoch: int) -> np.ndarray:
        """Tokens of every question, all its choices together: int32 [n]."""
        ends = self.sequences.boundaries[:: self.num_choices]
        return np.diff(ends).astype(np.int32)

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        """See `Source.batch`; B questions are B * C sequences, the choices of the first one, of the second, ..."""
        indices = row_indices(indices, len(self))
        labels = {} if self.labels is None else {"labels": self.labels[indices]}
        return self.sequences.gather(self._sequences_of(indices), num_choices=self.num_choices, **labels)

    def digest(self) -> str:
        """See `source_digest`."""
        return data_digest(self.num_choices, *self.sequences.arrays().values(), self.labels)

    def take(self, indices: np.ndarray) -> "MultipleChoiceSource":
        """A source of some of the questions (int [m]), in this order."""
        indices = row_indices(indices, len(self))
        return dataclasses.replace(
            self,
            contexts=[self.contexts[index] for index in indices],
            choices=[[column[index] for index in indices] for column in self.choices],
            sequences=self.sequences.take(self._sequences_of(indices)),
            labels=None if self.labels is None else self.labels[indices],
        )

    def decode(self, index: int) -> str:
        """A question as text: a line for every choice, "*" before the right one."""
        index = row_index(index, len(self))
        lines = []
        for number, place in enumerate(self._sequences_of(np.array([index])).tolist()):
            tokens = " ".join(self.tokenizer.convert_ids_to_tokens(self.sequences[place]["input_ids"].tolist()))
            is_right = self.labels is not None and self.labels[index] == number
            lines.append(f"{'*' if is_right else ' '} {number}: {tokens}")
        return "\n".join(lines)

    def _sequences_of(self, indices: np.ndarray) -> np.ndarray:
        """The sequences of some questions (int64 [B]): int64 [B * C]."""
        return (indices[:, None] * self.num_choices + np.arange(self.num_choices)).ravel()


@dataclass(frozen=True)
class _Questions:
    """What a table says: contexts and choices as in `MultipleChoiceSource`, the choices' columns, texts to tokenize."""

    contexts: list[str]
    columns: list[str]
    choices: list[list[str]]
    pairs: list[tuple[str, str]]  # those of question 0, of question 1, ...


def _questions(table: Table) -> _Questions:
    if {"sent1", "sent2", "ending0", "ending1"} <= set(table.names):
        return _endings(table)
    if {"premise", "question", "choice1", "choice2"} <= set(table.names):
        return _causes_and_effects(table)
    there = ", ".join(map(repr, table.names))
    raise SourceError(
        f"{table.name}: expected columns sent1, sent2, ending0, ending1, ... or premise, question, choice1, choice2, "
        f"got {there}"
    )


def _endings(table: Table) -> _Questions:
    first, second = table.texts("sent1"), table.texts("sent2")
    columns = [*_numbered("ending", 0, table)]
    choices = [table.texts(column) for column in columns]
    contexts = [f"{one} {two}".strip() for one, two in zip(first, second, strict=True)]
    pairs = [
        (one, f"{two} {ending}".strip())
        for one, two, *endings in zip(first, second, *choices, strict=True)
        for ending in endings
    ]
    return _Questions(contexts, columns, choices, pairs)


def _causes_and_effects(table: Table) -> _Questions:
    contexts, asked = table.texts("premise"), table.texts("question")
    for row, question in enumerate(asked):
        if question not in ("cause", "effect"):
            raise SourceError(f"{table.place(row)}: column 'question': expected 'cause' or 'effect', got {question!r}")
    columns = [*_numbered("choice", 1, table)]
    choices = [table.texts(column) for column in columns]
    pairs = [
        (premise, choice) if question == "effect" else (choice, premise)
        for premise, question, *these in zip(contexts, asked, *choices, strict=True)
        for choice in these
    ]
    return _Questions(contexts, columns, choices, pairs)


def _numbered(start: str, first: int, table: Table) -> Iterator[str]:
    """ending0, ending1, ...: as many as the table has."""
    for number in count(first):
        if f"{start}{number}" not in table.names:
            return
        yield f"{start}{number}"


def _labels(table: Table, column: str, choices: list[str]) -> np.ndarray:
    """The right choices: int64 [n]."""
    values = table.values(column)
    numbers = {name: number for number, name in enumerate(choices)}
    numbers |= {str(number): number for number in range(len(choices))}
    for row, value in enumerate(values):
        if isinstance(value, bool) or str(value) not in numbers:
            expected = f"a choice from 0 to {len(choices) - 1}, or its column"
            raise SourceError(f"{table.place(row)}: column {column!r}: expected {expected}, got {value!r}")
    return np.array([numbers[str(value)] for value in values], dtype=np.int64)
