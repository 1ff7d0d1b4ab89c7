"""Sentences of words that each carry a label: CoNLL columns, or rows with a list of words and a list of labels.

-DOCSTART- -X- O            words   John  ran  Go
# a comment                 labels    B-PER O    O
John NNP B-PER              lines   3     4    6
ran VBD O                   boundaries of sentences [0, 2, 3]

Go VB O
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from numbers import Integral
from typing import Any

import numpy as np

from bert_fast.checks import check_integer
from bert_fast.data.arguments import check_column, sequence_of
from bert_fast.data.tables import Table, is_unicode, label_problem, read_table
from bert_fast.data.text_files import read_text_file
from bert_fast.errors import SourceError
from bert_fast.files import path_name

__all__ = ["LabelledSentences", "check_rows", "read_conll", "sentences_from_rows"]

_SPACES = " \t\r"
_GAP = re.compile(r"[ \t][ \t\r]*")  # between columns without tabs; other spaces may be part of a word
_MAX_LABEL_BYTES = 256  # longer ones are texts: the column is not that of the labels
_LABELLED_ROW = re.compile(r"#(?: .*)?[ \t](?:O|[A-Z]-\S+)$", re.ASCII)


@dataclass(frozen=True, eq=False)
class LabelledSentences:
    """Words of n sentences behind one another, with a label each or without any.

    Attributes:
        name: of the file, for messages.
        buffer (uint8), word_boundaries (int64 [W + 1]): word i is buffer[word_boundaries[i]:word_boundaries[i + 1]] in
            UTF-8, as `encode_ragged` reads it. A word may be empty.
        boundaries (int64 [n + 1]): sentence i has words boundaries[i] to boundaries[i + 1] - 1.
        label_ids (int32 [W] or None): places in label_names; None: nobody labelled them.
        label_names: the labels that occur, or may: "O" first, then B- and I- of one type behind one another.
        lines (int64 [W] or None): of the file, from 1; None where words came from rows.
    """

    name: str
    buffer: np.ndarray
    word_boundaries: np.ndarray
    boundaries: np.ndarray
    label_ids: np.ndarray | None
    label_names: list[str]
    lines: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    @property
    def num_words(self) -> int:
        """Of all sentences together."""
        return len(self.word_boundaries) - 1

    @cached_property
    def words(self) -> list[str]:
        """The words of all sentences as strings, made when first asked for."""
        content, ends = self.buffer.tobytes(), self.word_boundaries.tolist()
        return [content[start:stop].decode() for start, stop in pairwise(ends)]

    def place(self, word: int) -> str:
        """Where a word stands, for messages: "train.conll: line 17"."""
        if self.lines is not None:
            return f"{self.name}: line {self.lines[word]}"
        row = int(np.searchsorted(self.boundaries, word, side="right")) - 1
        return f"{self.name}: row {row}: word {word - self.boundaries[row]}"


def read_conll(
    path: str | os.PathLike[str], *, word_column: int = 0, label_column: int | None = -1
) -> LabelledSentences:
    """Reads a file in CoNLL columns: a word a line, a blank line between sentences.

    Columns are separated by a tab each if the first row has one, otherwise by any number of spaces; then words may hold
    no space. Every row has the same number of them. Lines of whitespace are blank; lines that begin with -DOCSTART-
    end a sentence, too. A line that begins with "# " is a comment; in a file without tabs only before the first word of
    a sentence, and not if it ends with a label (O, B-...): then "#" is a word.

    Args:
        path: the file: UTF-8, lines end with LF or CRLF.
        word_column: number of the column with the words, from 0; negative: from the end.
        label_column: likewise of the labels; None: no labels are read.

    Raises:
        OSError: the file cannot be read.
        SourceError: it is empty or not UTF-8, has no words, a row has another number of columns than the first, columns
            are missing, or a word or label is empty; the message names file and line.
        TypeError, ValueError: an argument of another kind.
    """
    name = path_name("path", path)
    word_column = check_integer("word_column", word_column)
    label_column = None if label_column is None else check_integer("label_column", label_column)
    return _parse(name, read_text_file(name), word_column, label_column)


def sentences_from_rows(
    rows: Any, *, word_column: str = "tokens", label_column: str | None = "ner_tags", name: str = "rows"
) -> LabelledSentences:
    """The same from a `datasets.Dataset`, or a list of mappings.

    Args:
        rows: each has a list of strings in the word column, and in the label column as many strings, or numbers if the
            data set's features name them.
        word_column: name of the column of the words.
        label_column: likewise of the labels; None: no labels are read.
        name: for messages.

    Raises:
        SourceError: a column is missing, a value is of another kind, numbers of words and labels differ, or there is
            no row; the message names the row.
        TypeError: an argument, or a row, of another kind.
    """
    check_rows("rows", rows)
    check_column("word_column", word_column)
    check_column("label_column", label_column, is_optional=True)
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {type(name).__name__}")
    columns = [word_column] if label_column is None else [word_column, label_column]
    table = read_table(rows, columns, argument=name)
    sentences = table.values(word_column)
    lengths = [_length(table, row, word_column, values) for row, values in enumerate(sentences)]
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    try:
        buffer, word_boundaries = _joined(chain.from_iterable(sentences))
    except (TypeError, UnicodeEncodeError):
        raise SourceError(_first_wrong_word(table, word_column)) from None
    label_ids, label_names = None, list[str]()
    if label_column is not None:
        names = _feature_names(rows, label_column)
        label_ids, label_names = _labels_of_rows(table, label_column, lengths, names)
    return LabelledSentences(name, buffer, word_boundaries, boundaries, label_ids, label_names)


# Files


def _parse(name: str, content: str, word_column: int, label_column: int | None) -> LabelledSentences:
    words, labels, lines, boundaries = list[str](), list[str](), list[int](), [0]
    width = 0
    for line, columns in _rows(content):
        if not columns:
            if boundaries[-1] < len(words):
                boundaries.append(len(words))
            continue
        if not words:
            width = len(columns)
            _check_columns(f"{name}: line {line}", width, word_column, label_column)
        if len(columns) != width:
            raise SourceError(
                f"{name}: line {line}: expected {width} columns as in line {lines[0]}, got {len(columns)}"
            )
        words.append(columns[word_column])
        lines.append(line)
        if not words[-1]:
            raise SourceError(f"{name}: line {line}: expected a word, got an empty column")
        if label_column is not None:
            labels.append(columns[label_column])
            if not labels[-1]:
                raise SourceError(f"{name}: line {line}: expected a label, got an empty column")
    if not words:
        raise SourceError(f"{name}: expected a word a line, got no words")
    if boundaries[-1] < len(words):
        boundaries.append(len(words))
    longest = max(range(len(labels)), key=lambda row: len(labels[row]), default=None)
    if longest is not None and len(labels[longest].encode()) > _MAX_LABEL_BYTES:
        raise SourceError(
            f"{name}: line {lines[longest]}: expected a label of at most {_MAX_LABEL_BYTES} bytes, got "
            f"{len(labels[longest].encode())}: is this the column of the labels?"
        )
    label_ids, label_names = (None, list[str]()) if label_column is None else _numbered(labels)
    return LabelledSentences(name, *_joined(words), np.array(boundaries), label_ids, label_names, np.array(lines))


def _rows(content: str) -> Iterator[tuple[int, list[str]]]:
    """(number of the line, its columns) for every word; no columns where a sentence ends."""
    lines = content.split("\n")
    rows = (line for line in lines if line.strip(_SPACES) and not line.startswith(("# ", "-DOCSTART-")))
    has_tabs = "\t" in next(rows, lines[0]).rstrip(_SPACES)
    begins_sentence = True
    for number, line in enumerate(lines, 1):
        solid = line.rstrip(_SPACES)
        if not solid or solid.startswith("-DOCSTART-"):
            begins_sentence = True
            yield number, []
        elif line.startswith("# ") and (has_tabs or (begins_sentence and not _LABELLED_ROW.match(solid))):
            continue  # a comment
        else:
            begins_sentence = False
            yield number, solid.split("\t") if has_tabs else _GAP.split(solid.lstrip(_SPACES))


def _check_columns(place: str, width: int, word_column: int, label_column: int | None) -> None:
    for kind, column in (("words", word_column), ("labels", label_column)):
        if column is not None and not -width <= column < width:
            raise SourceError(f"{place}: expected a column {column} with the {kind}, got {width} columns")
    if label_column is not None and word_column % width == label_column % width:
        raise SourceError(
            f"{place}: expected a column of words and one of labels, got {width} columns, and column "
            f"{word_column % width} for both"
        )


def _joined(words: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of all words, and the boundaries between them; raises UnicodeEncodeError, or TypeError of no string."""
    encoded = list(map(str.encode, words))
    boundaries = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=boundaries[1:])
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), boundaries


def _numbered(labels: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Places of labels in the list of those that occur, and this list: "O" first, those of a type together."""
    names = sorted(set(labels), key=lambda label: (label != "O", label[2:] if label[1:2] == "-" else label, label))
    place = {label: index for index, label in enumerate(names)}
    return np.array([place[label] for label in labels], dtype=np.int32), names


# Rows


def check_rows(argument: str, rows: Any) -> None:
    """Raises TypeError unless it is a `datasets.Dataset` or a list."""
    if isinstance(rows, type) or not hasattr(rows, "column_names"):
        sequence_of(argument, rows)


def _length(table: Table, row: int, column: str, values: Any) -> int:
    is_array = isinstance(values, np.ndarray) and values.ndim == 1
    if isinstance(values, str | bytes) or not (is_array or isinstance(values, Sequence)):
        raise SourceError(f"{table.place(row)}: {column}: expected a list, got {type(values).__name__}")
    return len(values)


def _first_wrong_word(table: Table, column: str) -> str:
    for row, words in enumerate(table.values(column)):
        for word in words:
            if not isinstance(word, str):
                return f"{table.place(row)}: {column}: expected strings, got {type(word).__name__}"
            if not is_unicode(word):
                return f"{table.place(row)}: {column}: expected Unicode text, got a lone surrogate in {word!r}"
    raise AssertionError("no word is wrong")


def _feature_names(rows: Any, column: str) -> list[str] | None:
    """What a data set calls its labels 0, 1, ..., or None."""
    feature = (getattr(rows, "features", None) or {}).get(column)
    return getattr(getattr(feature, "feature", feature), "names", None)


def _labels_of_rows(
    table: Table, column: str, lengths: list[int], names: list[str] | None
) -> tuple[np.ndarray, list[str]]:
    """Places of all labels in the list of their names, and this list."""
    lists = table.values(column)
    for row, (values, length) in enumerate(zip(lists, lengths, strict=True)):
        found = _length(table, row, column, values)
        if found != length:
            raise SourceError(f"{table.place(row)}: {column}: expected a label for each of {length} words, got {found}")
    labels = list(chain.from_iterable(lists))
    if all(isinstance(label, str) for label in labels):
        for row, values in enumerate(lists):
            for label in values:
                if problem := label_problem(label):
                    raise SourceError(f"{table.place(row)}: {column}: {problem}")
        return _numbered(labels)
    if names is None:
        raise SourceError(f"{table.name}: {column}: expected strings, or numbers that the features of a data set name")
    is_number = all(isinstance(label, Integral) and not isinstance(label, bool) for label in labels)
    if not is_number or not 0 <= min(labels) <= max(labels) < len(names):
        raise SourceError(f"{table.name}: {column}: expected numbers from 0 to {len(names) - 1}, got others")
    return np.array(labels, dtype=np.int32), list(names)
