"""Queries with documents to be put in order, for models that read both at once: cross-encoders.

query               document                          label
who wrote Faust?    Goethe worked on Faust ...        1
who wrote Faust?    [Goethe worked ..., Gounod ...]   [1, 0]        JSON lines, Parquet: lists

query               positive                  negative              teacher
who wrote Faust?    Goethe worked on ...      Gounod's opera ...    [9.1, 2.3], or 6.8
"""

import dataclasses
import math
import os
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from bert_fast.checks import check_choice, check_number
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
from bert_fast.data.sequences import Sequences, ranges
from bert_fast.data.tables import Table, is_unicode, read_table
from bert_fast.errors import SourceError
from bert_fast.numerals import table_number
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch

__all__ = ["RERANKING_LOSSES", "RerankingLoss", "RerankingSource"]

RerankingLoss = Literal["binary", "softmax", "list_net", "mse", "margin_mse"]
RERANKING_LOSSES: tuple[RerankingLoss, ...] = get_args(RerankingLoss)
_OF_LISTS = ("softmax", "list_net", "margin_mse")  # these compare the documents of a row


@dataclass(frozen=True)
class RerankingSource:
    """Queries, each with one document or more: a `Source`, the same in every epoch.

    An example is a sequence for each of its documents, [CLS] query [SEP] document [SEP]. Batches hold cu_lists (int64
    [B + 1]), the sequences of example i are cu_lists[i] to cu_lists[i + 1] - 1; longest_list (int), documents of the
    longest example of all; and labels (fp32 [N]) where there are any.

    Attributes:
        tokenizer: made the tokens.
        queries: n texts.
        documents: n lists of texts.
        sequences: N of them, those of example 0, of example 1, ...
        cu_lists (int64 [n + 1]): where those of each example begin, and the end.
        labels (fp32 [N] or None): what the loss is to bring scores near to.
        is_relevant (bool [N] or None): which documents belong to their queries, for metrics.
    """

    tokenizer: Tokenizer
    queries: list[str]
    documents: list[list[str]]
    sequences: Sequences
    cu_lists: np.ndarray
    labels: np.ndarray | None
    is_relevant: np.ndarray | None

    @classmethod
    def read(
        cls,
        source: Any,
        tokenizer: Tokenizer,
        *,
        query: str = "query",
        document: str = "document",
        label: str | None = "label",
        positive: str = "positive",
        negatives: Sequence[str] = (),
        teacher: str | None = None,
        loss: RerankingLoss = "binary",
        relevant_from: float = 0.5,
        max_length: int | None = 256,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> "RerankingSource":
        """Reads and tokenizes a table.

        Args:
            source: a file, a `datasets.Dataset` or a list of mappings: see `bert_fast.data.tables`.
            tokenizer: as the model's.
            query: the column of queries.
            document: without negatives, the column of documents: a text, or a list of them.
            label: then, the column of a number for each document; None: the examples have none.
            positive: with negatives, the column of documents that belong to the queries; labels are then 1 and 0.
            negatives: columns of documents that do not.
            teacher: with negatives, the column of another model's scores, for the positive and the negatives in their
                order; or, for "margin_mse", of margins, by how much it scores the positive above each negative.
            loss: which labels are right depends on it: from 0 to 1 for "binary"; from 0 on, one of them above it, for
                "softmax"; any for others. All but "binary" and "mse" need two documents.
            relevant_from: without negatives, a document of at least this label belongs to its query.
            max_length: greatest number of tokens; the longer of query and document is cut first. None: nothing is cut.
            cache_dir: where tokens are kept from one run to the next; None: nowhere.

        Raises:
            SourceError: the table cannot be read; with the row: a text is no string or has nothing but spaces, a
                document is there twice, a negative is a positive of the same query, a label is missing or out of
                range, there are too few documents.
            OSError, TypeError, ValueError: see `read_table` and `Sequences.cached`.
        """
        check_tokenizer_kind(tokenizer)
        check_choice("loss", loss, RERANKING_LOSSES)
        negatives = texts_of("negatives", negatives)
        columns = [query, positive, *negatives] if negatives else [query, document]
        names = ["query", "positive", *["negatives"] * len(negatives)] if negatives else ["query", "document"]
        for name, column in zip(names, columns, strict=True):
            check_column(name, column)
        if len(set(columns)) < len(columns):
            raise ValueError(f"{', '.join(dict.fromkeys(names))}: expected different columns, got {', '.join(columns)}")
        check_column("label", label, is_optional=True)
        check_column("teacher", teacher, is_optional=True)
        relevant_from = check_number("relevant_from", relevant_from)
        max_length, cache_dir = optional_length("max_length", max_length), optional_folder("cache_dir", cache_dir)
        numbers = teacher if negatives else label
        table = read_table(source, columns if numbers is None else [*columns, numbers])
        if negatives:
            queries, documents = _with_negatives(table, columns)
            labels = [[1.0] + [0.0] * len(negatives)] * len(queries)
            is_relevant: list[list[bool]] | None = [[True] + [False] * len(negatives)] * len(queries)
            if teacher is not None:
                labels = _teacher(table, teacher, len(negatives), loss)
        else:
            queries, documents = _texts(table, query), _documents(table, document)
            labels = [] if label is None else _labels(table, label, documents)
            is_relevant = None if label is None else [[one >= relevant_from for one in row] for row in labels]
        if labels:
            _check_labels(table, columns[1] if numbers is None else numbers, labels, loss)
        sequences = Sequences.cached(
            cache_dir, tokenizer, [text for text, row in zip(queries, documents, strict=True) for _ in row],
            [text for row in documents for text in row], max_length,
        )  # fmt: skip
        cu_lists = np.concatenate([[0], np.cumsum([len(row) for row in documents], dtype=np.int64)])
        return cls(
            tokenizer, queries, documents, sequences, cu_lists, np.array(_flat(labels), np.float32) if labels else None,
            None if is_relevant is None else np.array(_flat(is_relevant), bool),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.queries)

    def lengths(self, epoch: int) -> np.ndarray:
        """Tokens of every example, all its sequences together: int32 [n]."""
        return np.diff(self.sequences.boundaries[self.cu_lists]).astype(np.int32)

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        """See `Source.batch`; the sequences of the first example, of the second, ..."""
        indices = row_indices(indices, len(self))
        places = self._sequences_of(indices)
        counts = np.diff(self.cu_lists)
        labels = {} if self.labels is None else {"labels": self.labels[places]}
        return self.sequences.gather(
            places, cu_lists=np.concatenate([[0], np.cumsum(counts[indices])]).astype(np.int64),
            longest_list=int(counts.max(initial=1)), **labels,
        )  # fmt: skip

    def digest(self) -> str:
        """See `source_digest`."""
        return data_digest(self.cu_lists, *self.sequences.arrays().values(), self.labels, self.is_relevant)

    def take(self, indices: np.ndarray) -> "RerankingSource":
        """A source of some of the examples (int [m]), in this order."""
        indices = row_indices(indices, len(self))
        places = self._sequences_of(indices)
        return dataclasses.replace(
            self,
            queries=[self.queries[index] for index in indices],
            documents=[self.documents[index] for index in indices],
            sequences=self.sequences.take(places),
            cu_lists=np.concatenate([[0], np.cumsum(np.diff(self.cu_lists)[indices])]).astype(np.int64),
            labels=None if self.labels is None else self.labels[places],
            is_relevant=None if self.is_relevant is None else self.is_relevant[places],
        )

    def decode(self, index: int) -> str:
        """An example as text: a line for each document, its label before it."""
        index = row_index(index, len(self))
        lines = []
        for place in self._sequences_of(np.array([index])).tolist():
            tokens = " ".join(self.tokenizer.convert_ids_to_tokens(self.sequences[place]["input_ids"].tolist()))
            lines.append(tokens if self.labels is None else f"{self.labels[place]:g} {tokens}")
        return "\n".join(lines)

    def _sequences_of(self, indices: np.ndarray) -> np.ndarray:
        """The sequences of some examples (int64 [B]), int64 [N]."""
        starts = self.cu_lists[indices]
        return ranges(starts, self.cu_lists[indices + 1] - starts)


def _flat(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """The entries of all rows, one behind the other."""
    return [entry for row in rows for entry in row]


def _texts(table: Table, column: str) -> list[str]:
    texts = table.texts(column)
    for row, text in enumerate(texts):
        _check_text(table, row, column, text)
    return texts


def _check_text(table: Table, row: int, column: str, text: Any) -> None:
    if not isinstance(text, str) or not text.strip() or not is_unicode(text):
        raise SourceError(f"{table.place(row)}: column {column!r}: expected a text, got {reprlib.repr(text)}")


def _documents(table: Table, column: str) -> list[list[str]]:
    """A text of its own is a list of one."""
    made = []
    for row, value in enumerate(table.values(column)):
        texts = list(value) if isinstance(value, list | tuple) else [value]
        if not texts:
            raise SourceError(f"{table.place(row)}: column {column!r}: expected at least one text, got an empty list")
        for text in texts:
            _check_text(table, row, column, text)
        if len(set(texts)) < len(texts):
            twice = next(text for text in texts if texts.count(text) > 1)
            raise SourceError(
                f"{table.place(row)}: column {column!r}: expected different texts, got {reprlib.repr(twice)} twice"
            )
        made.append(texts)
    return made


def _with_negatives(table: Table, columns: list[str]) -> tuple[list[str], list[list[str]]]:
    """(queries, the positive and the negatives of each)."""
    queries, positives, *others = [_texts(table, column) for column in columns]
    first_rows: dict[tuple[str, str], int] = {}
    for row, pair in enumerate(zip(queries, positives, strict=True)):
        first_rows.setdefault(pair, row)
    for column, texts in zip(columns[2:], others, strict=True):
        for row, (query, text) in enumerate(zip(queries, texts, strict=True)):
            where = first_rows.get((query, text))
            if where is not None:
                got = "the positive" if text == positives[row] else f"a positive of this query, {table.place(where)}"
                raise SourceError(f"{table.place(row)}: column {column!r}: expected a negative, got {got}")
    documents = [list(texts) for texts in zip(positives, *others, strict=True)]
    for row, texts in enumerate(documents):
        if len(set(texts)) < len(texts):
            twice = next(column for place, column in enumerate(columns[1:]) if texts[place] in texts[:place])
            raise SourceError(f"{table.place(row)}: column {twice!r}: expected a text that is not there already")
    return queries, documents


def _labels(table: Table, column: str, documents: list[list[str]]) -> list[list[float]]:
    """A number for each document."""
    made = []
    for row, (value, texts) in enumerate(zip(table.values(column), documents, strict=True)):
        values = list(value) if isinstance(value, list | tuple) else [value]
        if len(values) != len(texts):
            raise SourceError(
                f"{table.place(row)}: column {column!r}: expected {len(texts)} numbers, one for each document, got "
                f"{len(values)}"
            )
        made.append([_number(table, row, column, one) for one in values])
    return made


def _teacher(table: Table, column: str, num_negatives: int, loss: str) -> list[list[float]]:
    """Scores of the positive and the negatives; of margins, those that have them: 0 and -margin."""
    made = []
    may_be_margins = loss == "margin_mse"
    expected = f"{num_negatives + 1} scores" + (f" or {num_negatives} margins" if may_be_margins else "")
    for row, value in enumerate(table.values(column)):
        values = list(value) if isinstance(value, list | tuple) else [value]
        numbers = [_number(table, row, column, one) for one in values]
        if may_be_margins and len(numbers) == num_negatives:
            numbers = [0.0, *(-one for one in numbers)]
        if len(numbers) != num_negatives + 1:
            raise SourceError(f"{table.place(row)}: column {column!r}: expected {expected}, got {len(numbers)}")
        made.append(numbers)
    return made


def _number(table: Table, row: int, column: str, value: Any) -> float:
    number = table_number(value)
    if math.isnan(number):
        raise SourceError(f"{table.place(row)}: column {column!r}: expected a number, got {reprlib.repr(value)}")
    return number


def _check_labels(table: Table, column: str, labels: list[list[float]], loss: str) -> None:
    """Sees that the loss is defined for these labels."""
    for row, numbers in enumerate(labels):
        place = f"{table.place(row)}: column {column!r}"
        if loss in _OF_LISTS and len(numbers) < 2:
            raise SourceError(f"{place}: expected at least two documents, which {loss} compares, got {len(numbers)}")
        if loss == "binary" and not 0 <= min(numbers) <= max(numbers) <= 1:
            wrong = next(one for one in numbers if not 0 <= one <= 1)
            raise SourceError(f"{place}: expected a label from 0 to 1, got {wrong:g}")
        if loss == "softmax" and (min(numbers) < 0 or max(numbers) == 0):
            raise SourceError(f"{place}: expected labels from 0 on, one of them above it, got {reprlib.repr(numbers)}")
