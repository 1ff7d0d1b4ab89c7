"""Pairs of texts that belong together, queries and documents, with further documents that do not: for embeddings.

query                 positive                     negative
who wrote Faust?      Goethe worked on Faust ...   Gounod's opera Faust ...

Or pairs of texts with a score each, and triplets with a margin.
"""

import dataclasses
import math
import os
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from bert_fast.checks import check_choice
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
from bert_fast.data.tables import Table, read_table
from bert_fast.errors import SourceError
from bert_fast.numerals import table_number
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch

__all__ = ["EMBEDDING_LOSSES", "EmbeddingLoss", "EmbeddingSource", "text_groups"]

EmbeddingLoss = Literal["in_batch", "cosent", "cosine_mse", "contrastive", "triplet", "margin_mse"]
EMBEDDING_LOSSES: tuple[EmbeddingLoss, ...] = get_args(EmbeddingLoss)


@dataclass(frozen=True)
class EmbeddingSource:
    """Queries, each with the document that answers it and C - 2 that do not: a `Source`, the same in every epoch.

    An example is C sequences. Rows whose queries or whose positives are the same text belong together, and so do rows
    that are joined by others: such a group's documents are no negatives of its queries, in whatever batch they meet.
    Batches hold num_texts (int, C), query_groups (int64 [B]) and document_groups (int64 [B, C - 1]), as
    `losses.in_batch_negatives` wants them, and scores (fp32 [B]) where there are any.

    Attributes:
        tokenizer: made the tokens.
        texts: C lists: queries, positives, first negatives, ...
        sequences: the texts of example 0, of example 1, ...: n * C sequences.
        groups (int64 [n, C]): of every text, from 0; a negative that is nobody's positive has one of its own.
        scores (fp32 [n] or None): of query and positive, or by how much the positive is above the negative.
        notes: what was done about rows that share a text, and texts that are too long, with the first one's place.
    """

    tokenizer: Tokenizer
    texts: list[list[str]]
    sequences: Sequences
    groups: np.ndarray
    scores: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        source: Any,
        tokenizer: Tokenizer,
        *,
        query: str = "query",
        positive: str = "positive",
        negatives: Sequence[str] = (),
        score: str | None = None,
        loss: EmbeddingLoss = "in_batch",
        max_length: int | None = 128,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> "EmbeddingSource":
        """Reads and tokenizes a table.

        Args:
            source: a file, a `datasets.Dataset` or a list of mappings: see `bert_fast.data.tables`.
            tokenizer: as the model's.
            query: the column of queries (anchors).
            positive: the column of documents that belong to them.
            negatives: columns of documents that do not ("hard" negatives).
            score: the column of a number for each row; None: rows have none.
            loss: which numbers are right depends on it: from -1 to 1 for "cosine_mse", 1 or 0 for "contrastive", any
                for others.
            max_length: greatest number of tokens of a text; the rest is cut. None: nothing is cut.
            cache_dir: where tokens are kept from one run to the next; None: nowhere.

        Raises:
            SourceError: the table cannot be read, a text is no string or has nothing but spaces, a negative is the
                positive of its row, a score is missing or out of range.
            OSError, TypeError, ValueError: see `read_table` and `Sequences.cached`.
        """
        check_tokenizer_kind(tokenizer)
        check_choice("loss", loss, EMBEDDING_LOSSES)
        check_column("score", score, is_optional=True)
        columns = [query, positive, *texts_of("negatives", negatives)]
        for name, column in zip(("query", "positive", *["negatives"] * len(columns)), columns, strict=False):
            check_column(name, column)
        if len(set(columns)) < len(columns):
            raise ValueError(f"query, positive, negatives: expected different columns, got {', '.join(columns)}")
        max_length, cache_dir = optional_length("max_length", max_length), optional_folder("cache_dir", cache_dir)
        table = read_table(source, columns if score is None else [*columns, score])
        texts = [_texts(table, column) for column in columns]
        for column, of_column in zip(columns[2:], texts[2:], strict=True):
            for row, (text, right) in enumerate(zip(of_column, texts[1], strict=True)):
                if text == right:
                    raise SourceError(f"{table.place(row)}: column {column!r}: expected a negative, got the positive")
        flat = [text for row in zip(*texts, strict=True) for text in row]
        sequences = Sequences.cached(cache_dir, tokenizer, flat, None, max_length)
        too_long = () if max_length is None else _too_long(tokenizer, table, columns, flat, sequences, max_length)
        groups = text_groups(texts)
        notes = (*(_shared(table, groups) if loss == "in_batch" else ()), *too_long)
        return cls(tokenizer, texts, sequences, groups, _scores(table, score, loss), notes)

    @property
    def num_texts(self) -> int:
        """C: how many texts every example has."""
        return len(self.texts)

    def __len__(self) -> int:
        return len(self.texts[0])

    def lengths(self, epoch: int) -> np.ndarray:
        """Tokens of every example, all its texts together: int32 [n]."""
        return np.diff(self.sequences.boundaries[:: self.num_texts]).astype(np.int32)

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        """See `Source.batch`; B examples are B * C sequences, the texts of the first one, of the second, ..."""
        indices = row_indices(indices, len(self))
        groups = self.groups[indices]
        return self.sequences.gather(
            self._sequences_of(indices), num_texts=self.num_texts, query_groups=groups[:, 0].copy(),
            document_groups=groups[:, 1:].copy(),
            **({} if self.scores is None else {"scores": self.scores[indices]}),
        )  # fmt: skip

    def digest(self) -> str:
        """See `source_digest`."""
        return data_digest(self.num_texts, *self.sequences.arrays().values(), self.groups, self.scores)

    def take(self, indices: np.ndarray) -> "EmbeddingSource":
        """A source of some of the examples (int [m]), in this order."""
        indices = row_indices(indices, len(self))
        return dataclasses.replace(
            self,
            texts=[[column[index] for index in indices] for column in self.texts],
            sequences=self.sequences.take(self._sequences_of(indices)),
            groups=self.groups[indices],
            scores=None if self.scores is None else self.scores[indices],
        )

    def decode(self, index: int) -> str:
        """An example as text, a line each: "?" query, "+" positive, "-" every negative, "=" score."""
        index = row_index(index, len(self))
        lines = []
        for number, place in enumerate(self._sequences_of(np.array([index])).tolist()):
            tokens = " ".join(self.tokenizer.convert_ids_to_tokens(self.sequences[place]["input_ids"].tolist()))
            lines.append(f"{'?+-'[min(number, 2)]} {tokens}")
        if self.scores is not None:
            lines.append(f"= {self.scores[index]:g}")
        return "\n".join(lines)

    def _sequences_of(self, indices: np.ndarray) -> np.ndarray:
        """The sequences of some examples (int64 [B]): int64 [B * C]."""
        return (indices[:, None] * self.num_texts + np.arange(self.num_texts)).ravel()


def _texts(table: Table, column: str) -> list[str]:
    texts = table.texts(column)
    for row, text in enumerate(texts):
        if not text.strip():
            raise SourceError(f"{table.place(row)}: column {column!r}: expected a text, got {text!r}")
    return texts


def _shared(table: Table, groups: np.ndarray) -> Iterator[str]:
    """Says that rows belong together, and which are the first."""
    _, first, of_row, count = np.unique(groups[:, 0], return_index=True, return_inverse=True, return_counts=True)
    together = np.flatnonzero(count[of_row] > 1)
    if len(together):
        row = next(row for row in together.tolist() if first[of_row[row]] != row)
        yield (
            f"{table.name}: {len(together):,} rows share a query or a positive with others, directly or through "
            f"others, and are no negatives of them; the first: {table.place(row)}, of the group of "
            f"{table.place(int(first[of_row[row]]))}"
        )


def _too_long(
    tokenizer: Tokenizer, table: Table, columns: list[str], flat: list[str], sequences: Sequences, max_length: int
) -> Iterator[str]:
    """Says that texts were cut, and which is the first. Those that came out as long as may be are counted again."""
    full = np.flatnonzero(np.diff(sequences.boundaries) >= max_length)
    lengths = np.diff(tokenizer.encode_ragged([flat[place] for place in full]).cu_seqlens)
    longer = np.flatnonzero(lengths > max_length)
    if len(longer):
        row, column = divmod(int(full[longer[0]]), len(columns))
        yield (
            f"{table.name}: {len(longer):,} texts have more than {max_length} tokens and are cut; the first: "
            f"{table.place(row)}, column {columns[column]!r}, {lengths[longer[0]]:,} tokens"
        )


def _scores(table: Table, column: str | None, loss: str) -> np.ndarray | None:
    """Every row's number, fp32 [n]."""
    if column is None:
        return None
    found = []
    for row, value in enumerate(table.values(column)):
        number = table_number(value)
        is_right, expected = not math.isnan(number), "a number"
        if loss == "cosine_mse":
            is_right, expected = -1 <= number <= 1, "a cosine, from -1 to 1"
        elif loss == "contrastive":
            is_right, expected = number in (0, 1), "1 or 0"
        if not is_right:
            raise SourceError(f"{table.place(row)}: column {column!r}: expected {expected}, got {reprlib.repr(value)}")
        found.append(number)
    return np.array(found, np.float32)


def text_groups(texts: Sequence[Sequence[str]]) -> np.ndarray:
    """See `EmbeddingSource.groups`, int64 [n, C]; texts: C lists, queries first, then positives, then others."""
    parents: dict[tuple[str, str], tuple[str, str]] = {}

    def root(node: tuple[str, str]) -> tuple[str, str]:
        path = []
        while (above := parents.setdefault(node, node)) != node:
            path.append(node)
            node = above
        for one in path:
            parents[one] = node
        return node

    for query, positive in zip(*texts[:2], strict=True):
        parents[root(("query", query))] = root(("document", positive))
    number_of: dict[tuple[str, str], int] = {}

    def number(node: tuple[str, str]) -> int:
        return number_of.setdefault(root(node), len(number_of))

    rows = [
        [number(("query", row[0])), *(number(("document", text)) for text in row[1:])]
        for row in zip(*texts, strict=True)
    ]
    return np.array(rows, dtype=np.int64)
