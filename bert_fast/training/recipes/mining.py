"""Hard negatives: texts of a corpus that a model finds near to a query, and that do not belong to it.

Xiong et al. 2021 (arXiv:2007.00808): the negatives that teach most are those that a model confuses with the answer.
Margins: Moreira et al. 2024 (arXiv:2407.15831), section 3, against answers that nobody has marked as such.
"""

import math
import os
import reprlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_fast.checks import check_count, check_number
from bert_fast.data.arguments import check_column
from bert_fast.data.embedding import text_groups
from bert_fast.data.tables import Table, read_table
from bert_fast.data.text_files import ReadOptions
from bert_fast.errors import SourceError
from bert_fast.training.recipes.embedding import Embedder
from bert_fast.training.recipes.embedding_files import find_texts, read_groups
from bert_fast.training.recipes.reranking import CrossEncoder
from bert_fast.training.recipes.search import Index, search

__all__ = ["Limits", "Mined", "mine", "read_corpus"]

_WIDER = 10  # documents looked at for each that is wanted, where limits leave some out
_ROWS_COMPARED, _SAME_VECTOR = 16, 0.98  # cosine of one text's vectors in two precisions; of two texts', it may be 0.9


@dataclass(frozen=True)
class Limits:
    """Which documents may be negatives of a query. They are taken in the order of their scores, cosines.

    Attributes:
        first: so many of those that may be are skipped: the nearest are often answers that nobody has marked.
        depth: documents looked at, the nearest ones; None: as many as are needed, ten times as many beside one of the
            other limits.
        margin: a score is by so much below that of the query's positive, the lowest of several.
        relative_margin: it is below that by this share of it.
        max_score: it is at most this.

    Raises: TypeError, ValueError naming the argument.
    """

    first: int = 0
    depth: int | None = None
    margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", check_count("first", self.first, 0))
        if self.depth is not None:
            object.__setattr__(self, "depth", check_count("depth", self.depth, 1))
        for name, least, most in (("margin", 0, 2), ("relative_margin", 0, 1), ("max_score", -1, 1)):
            value = getattr(self, name)
            if value is not None and not least <= check_number(name, value) <= most:
                raise ValueError(f"{name}: expected a number from {least} to {most}, got {value}")

    def looked_at(self, wanted: int) -> int:
        """`depth`, or what it is where there is none. Raises ValueError if it is too few for `wanted` negatives."""
        others = (self.margin, self.relative_margin, self.max_score)
        depth = self.depth
        if depth is None:
            depth = self.first + wanted * (1 if all(one is None for one in others) else _WIDER)
        if depth < self.first + wanted:
            raise ValueError(f"depth: expected at least first + count, {self.first + wanted}, got {depth}")
        return depth

    def highest(self, positive: float) -> float:
        """The highest score that a negative may have beside a positive of this one."""
        limits = [math.inf if self.max_score is None else self.max_score]
        if self.margin is not None:
            limits.append(positive - self.margin)
        if self.relative_margin is not None:
            limits.append(positive - abs(positive) * self.relative_margin)
        return min(limits)


@dataclass(frozen=True)
class Mined:
    """Rows with their negatives.

    Attributes:
        rows: of the table, all its columns, and negative_1, negative_2, ..., the nearest first; teacher, the scores of
            positive and negatives, where there is one.
        short: places of the rows that are left out, as the table names them: too few negatives were found.
        corpus: different texts that were searched.
    """

    rows: list[dict[str, Any]]
    short: list[str]
    corpus: int


def read_corpus(
    files: Sequence[str | os.PathLike[str]], format: str = "auto", field: str = "text", errors: str = "strict"
) -> list[str]:
    """All texts of files as `bert-fast embed` takes them, empty ones too: text i is that of row i of an index.

    Raises: OSError, SourceError, ValueError: see `embed_files`.
    """
    groups = read_groups(find_texts(files, format, field), ReadOptions(field, errors))
    return [group.text(place) for group in groups for place in range(len(group))]


def mine(
    embedder: Embedder,
    rows: Any,
    corpus: Sequence[str] = (),
    *,
    index: Index | None = None,
    count: int = 3,
    limits: Limits | None = None,
    query: str = "query",
    positive: str = "positive",
    teacher: CrossEncoder | None = None,
) -> Mined:
    """`count` hard negatives for every row, by exact search among the corpus and the positives of all rows.

    Rows with the same query, or the same positive, belong together, as for `EmbeddingSource`: no document of a query's
    group is a negative of it, nor is the query itself. Texts that differ in spaces around them only are one, and empty
    ones are none.

    Args:
        embedder: makes the vectors.
        rows: a table of queries and positives: see `bert_fast.data.tables`.
        corpus: further texts; all are in memory, with their vectors where there is no index.
        index: the vectors of the corpus, row i that of text i, which are not made again; all others are made as they
            were (`Index.fitted`), and scores are cosines whatever its similarity is.
        count: of negatives.
        limits: which texts may be negatives; None: all that are not the query's.
        query: the column of queries.
        positive: the column of documents that belong to them.
        teacher: scores the positive and the negatives of every row.

    Raises:
        SourceError: the table cannot be read, an entry of the two columns is no text, a column that is to be added is
            there already; with the row. No row gets as many negatives.
        TypeError, ValueError: wrong arguments; an index of another model, or of other texts.
    """
    count, limits = check_count("count", count, 1), limits or Limits()
    depth = limits.looked_at(count)
    check_column("query", query)
    check_column("positive", positive)
    if query == positive:
        raise ValueError(f"query, positive: expected different columns, got {query!r} twice")
    table = read_table(rows, [query, positive], argument="rows")
    added = [f"negative_{number}" for number in range(1, count + 1)] + (["teacher"] if teacher is not None else [])
    for name in added:
        if name in table.names:
            raise SourceError(f"{table.name}: expected no column {name!r}, which is to be added, got one")
    queries, positives = (_texts(table, column) for column in (query, positive))
    row_of: dict[str, int] = {}  # of the first of texts that are one: texts, in this order
    for row, text in enumerate([*corpus, *positives]):
        if key := text.strip():
            row_of.setdefault(key, row)
    texts = [corpus[row] if row < len(corpus) else positives[row - len(corpus)] for row in row_of.values()]
    if index is not None:
        embedder = index.fitted(embedder)
        _check_texts(index, embedder, corpus)
    indexed = np.array([row for row in row_of.values() if index is not None and row < len(corpus)], np.int64)
    searched = _Searched(embedder, texts, index, indexed)
    negatives = _nearest(searched, queries, positives, count, depth, limits)
    found = [row for row in range(len(table)) if queries[row].strip() in negatives]
    if not found:
        raise SourceError(
            f"{table.name}: expected at least one row with {count} negatives among {len(texts)} texts, got none"
        )
    chosen = [[texts[place] for place in negatives[queries[row].strip()]] for row in found]
    columns = {name: table.values(name) for name in table.names}
    made = [
        {name: values[row] for name, values in columns.items()} | dict(zip(added, its, strict=False))
        for row, its in zip(found, chosen, strict=True)
    ]
    if teacher is not None:
        _teach(teacher, made, [queries[row] for row in found], [positives[row] for row in found], chosen)
    short = sorted(set(range(len(table))) - set(found))
    return Mined(made, [table.place(row) for row in short], len(texts))


def _texts(table: Table, column: str) -> list[str]:
    texts = table.texts(column)
    for row, text in enumerate(texts):
        if not text.strip():
            raise SourceError(f"{table.place(row)}: column {column!r}: expected a text, got {text!r}")
    return texts


def _check_texts(index: Index, embedder: Embedder, corpus: Sequence[str]) -> None:
    """Sees that the vectors are those of the texts, as far as some of them tell."""
    if len(corpus) != index.count:
        raise ValueError(f"index: expected as many vectors as the corpus has texts, {len(corpus)}, got {index.count}")
    rows = np.unique(np.linspace(0, index.count - 1, _ROWS_COMPARED).astype(np.int64)) if index.count else np.arange(0)
    made = embedder.embed([corpus[row] for row in rows.tolist()])
    for row, one, other in zip(rows.tolist(), made, index.vectors_of(rows), strict=True):
        if one.any() and _cosine(one, other) < _SAME_VECTOR:
            raise ValueError(
                f"index: row {row}: expected the vector of the text there in the corpus, {reprlib.repr(corpus[row])}, "
                "got one of another text"
            )


class _Searched:
    """Different texts with their vectors: of the first ones, rows of an index; of the others, made here."""

    def __init__(self, embedder: Embedder, texts: list[str], index: Index | None, indexed: np.ndarray) -> None:
        self.embedder, self.texts = embedder, texts
        self._index, self._indexed = index, indexed
        self._made = embedder.embed(texts[len(indexed) :])

    def vectors_of(self, places: np.ndarray) -> np.ndarray:
        """Vectors of some texts (places: int64 [n], ascending), [n, H]."""
        first = int(np.searchsorted(places, len(self._indexed)))
        made = self._made[places[first:] - len(self._indexed)]
        if self._index is None:
            return made
        return np.concatenate([self._index.vectors_of(self._indexed[places[:first]]), made])

    def nearest(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and places in `texts` [Q, k], as `search` gives them."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "made.npy"
            np.save(path, self._made)
            scores, places = search(Index(path), queries, top_k)
        if self._index is None:
            return scores, places
        keep = np.zeros(self._index.count, bool)
        keep[self._indexed] = True
        of_index, rows = search(Index(self._index.path), queries, top_k, keep=keep)
        scores = np.concatenate([of_index, scores], axis=1)
        places = np.concatenate([np.searchsorted(self._indexed, rows), places + len(self._indexed)], axis=1)
        best = np.lexsort((places, -scores))[:, :top_k]
        return np.take_along_axis(scores, best, 1), np.take_along_axis(places, best, 1)


def _nearest(
    searched: _Searched, queries: list[str], positives: list[str], count: int, depth: int, limits: Limits
) -> dict[str, list[int]]:
    """The places in the texts of the negatives of each query for which there are enough."""
    place_of = {text.strip(): place for place, text in enumerate(searched.texts)}
    pairs = [[text.strip() for text in column] for column in (queries, positives)]
    of_group: dict[int, set[int]] = {}
    own: dict[str, set[int]] = {}  # places of a query's positives
    group_of: dict[str, int] = {}
    for asked, answer, group in zip(*pairs, text_groups(pairs)[:, 0].tolist(), strict=True):
        of_group.setdefault(group, set()).add(place_of[answer])
        own.setdefault(asked, set()).add(place_of[answer])
        group_of[asked] = group
    different = list(own)
    asked_vectors = searched.embedder.embed(different)
    excluded = [of_group[group_of[asked]] | {place_of.get(asked, -1)} for asked in different]
    scores, places = searched.nearest(asked_vectors, depth + max(map(len, excluded)))
    answers = np.unique([place_of[answer] for answer in pairs[1]])
    vector_of = dict(zip(answers.tolist(), searched.vectors_of(answers), strict=True))
    found = {}
    for number, asked in enumerate(different):
        lowest = min(_cosine(asked_vectors[number], vector_of[place]) for place in own[asked])
        highest, kept, seen = limits.highest(lowest), [], 0
        for score, place in zip(scores[number].tolist(), places[number].tolist(), strict=True):
            if place in excluded[number]:
                continue
            seen += 1
            if seen <= depth and score <= highest:
                kept.append(place)
        kept = kept[limits.first : limits.first + count]
        if len(kept) == count:
            found[asked] = kept
    return found


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    wide, other = a.astype(np.float64), b.astype(np.float64)
    lengths = np.sqrt(wide @ wide) * np.sqrt(other @ other)
    return float(np.float32(wide @ other / lengths)) if lengths > 0 else 0.0


def _teach(
    teacher: CrossEncoder, rows: list[dict[str, Any]], queries: list[str], positives: list[str],
    negatives: list[list[str]],
) -> None:  # fmt: skip
    """Adds the teacher's scores to rows."""
    documents = [[answer, *others] for answer, others in zip(positives, negatives, strict=True)]
    asked = [query for query, texts in zip(queries, documents, strict=True) for _ in texts]
    scores = iter(teacher.scores(asked, [text for texts in documents for text in texts]))
    for row, texts in zip(rows, documents, strict=True):
        row["teacher"] = [float(str(next(scores))) for _ in texts]
