"""Sentences of words that each carry a label: CoNLL columns, or rows with a list of words and a list of labels.

    -DOCSTART- -X- O            words   John  ran  Go
    # a comment                 labels    B-PER O    O
    John NNP B-PER              lines   3     4    6
    ran VBD O                   boundaries of sentences [0, 2, 3]

    Go VB O

Files are read without a Python object for each word: fields are found in the bytes by NumPy.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from numbers import Integral
from typing import Any

import numpy as np

from bert_fast.checks import check_integer
from bert_fast.data.arguments import check_column, sequence_of
from bert_fast.data.sequences import ranges
from bert_fast.data.tables import Table, is_unicode, read_table
from bert_fast.data.text_files import read_text_file
from bert_fast.errors import SourceError
from bert_fast.files import path_name

__all__ = ["LabelledSentences", "check_rows", "read_conll", "sentences_from_rows"]

_TAB, _NEWLINE, _RETURN, _SPACE = b"\t\n\r "
_MAX_LABEL_BYTES = 256  # longer ones are texts: the column is not that of the labels
_LABELLED_ROW = re.compile(rb"#(?: .*)?[ \t](?:O|[A-Z]-\S+)[ \t\r]*(?:\n|$)")


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
    return _parse(name, read_text_file(name).encode(), word_column, label_column)


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
        encoded = list(map(str.encode, chain.from_iterable(sentences)))
    except (TypeError, UnicodeEncodeError):
        raise SourceError(_first_wrong_word(table, word_column)) from None
    word_boundaries = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=word_boundaries[1:])
    buffer = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    label_ids, label_names = None, list[str]()
    if label_column is not None:
        names = _feature_names(rows, label_column)
        label_ids, label_names = _labels_of_rows(table, label_column, lengths, names)
    return LabelledSentences(name, buffer, word_boundaries, boundaries, label_ids, label_names)


# Files


def _parse(name: str, content: bytes, word_column: int, label_column: int | None) -> LabelledSentences:
    text = np.frombuffer(content + b"\n", dtype=np.uint8)
    line_ends = np.flatnonzero(text == _NEWLINE)
    line_starts = np.concatenate([[0], line_ends[:-1] + 1])
    is_solid = (text != _SPACE) & (text != _TAB) & (text != _RETURN) & (text != _NEWLINE)
    places = np.arange(len(text))
    last_solid = np.maximum.accumulate(np.where(is_solid, places, -1))
    stops = np.maximum(last_solid[line_ends] + 1, line_starts)  # without whitespace at the end
    is_blank = stops == line_starts
    for match in re.finditer(rb"^-DOCSTART-", content, re.MULTILINE):
        is_blank[np.searchsorted(line_ends, match.start())] = True
    has_tabs, is_comment = _comments(content, line_starts, stops, is_blank)

    rows = np.flatnonzero(~is_blank & ~is_comment)
    if not len(rows):
        raise SourceError(f"{name}: expected a word a line, got no words")
    next_solid = np.minimum.accumulate(np.where(is_solid, places, len(text))[::-1])[::-1]
    starts, stops = line_starts[rows], stops[rows]
    is_gap = text == _TAB
    if not has_tabs:  # a run of spaces and tabs is one gap, and none at the start of a line
        is_gap |= text == _SPACE
        is_gap[1:] &= is_solid[:-1]
        starts = next_solid[starts]
    gaps = np.flatnonzero(is_gap)
    row_of_gap = np.searchsorted(starts, gaps, side="right") - 1
    gaps = gaps[(row_of_gap >= 0) & (gaps < stops[np.maximum(row_of_gap, 0)])]
    row_of_gap = np.searchsorted(starts, gaps, side="right") - 1
    num_columns = np.bincount(row_of_gap, minlength=len(rows)) + 1
    width = _check_columns(name, rows, num_columns, word_column, label_column)

    gaps = gaps.reshape(len(rows), width - 1)
    field_starts = np.column_stack([starts, gaps + 1 if has_tabs else next_solid[gaps]])
    field_stops = np.column_stack([gaps, stops])
    lines = rows + 1
    buffer, word_boundaries = _fields(text, field_starts[:, word_column], field_stops[:, word_column])
    _check_not_empty(name, "word", lines, word_boundaries)
    label_ids, label_names = None, list[str]()
    if label_column is not None:
        labels, ends = _fields(text, field_starts[:, label_column], field_stops[:, label_column])
        _check_not_empty(name, "label", lines, ends)
        label_ids, label_names = _numbered(name, lines, labels, ends)
    sentence = np.cumsum(is_blank)[rows]
    boundaries = np.concatenate([[0], np.flatnonzero(np.diff(sentence)) + 1, [len(rows)]])
    return LabelledSentences(name, buffer, word_boundaries, boundaries, label_ids, label_names, lines)


def _comments(content: bytes, starts: np.ndarray, stops: np.ndarray, is_blank: np.ndarray) -> tuple[bool, np.ndarray]:
    """Whether columns are separated by tabs; which lines are comments: bool [L]."""
    is_comment = np.zeros(len(starts), dtype=bool)
    marked = [int(np.searchsorted(starts, match.start())) for match in re.finditer(rb"^# ", content, re.MULTILINE)]
    is_comment[marked] = True
    others = np.flatnonzero(~is_blank & ~is_comment)
    first = int(others[0]) if len(others) else 0
    has_tabs = b"\t" in content[starts[first] : stops[first]]
    if not has_tabs:
        for line in marked:
            begins_sentence = line == 0 or is_blank[line - 1] or is_comment[line - 1]
            is_comment[line] = begins_sentence and not _LABELLED_ROW.match(content, starts[line])
    return has_tabs, is_comment & ~is_blank


def _check_columns(
    name: str, rows: np.ndarray, num_columns: np.ndarray, word_column: int, label_column: int | None
) -> int:
    """The number of columns of every row."""
    width = int(num_columns[0])
    wrong = np.flatnonzero(num_columns != width)
    if len(wrong):
        line, found = rows[wrong[0]] + 1, num_columns[wrong[0]]
        raise SourceError(f"{name}: line {line}: expected {width} columns as in line {rows[0] + 1}, got {found}")
    for kind, column in (("words", word_column), ("labels", label_column)):
        if column is not None and not -width <= column < width:
            raise SourceError(
                f"{name}: line {rows[0] + 1}: expected a column {column} with the {kind}, got {width} columns"
            )
    if label_column is not None and word_column % width == label_column % width:
        raise SourceError(
            f"{name}: line {rows[0] + 1}: expected a column of words and one of labels, got {width} columns, and "
            f"column {word_column % width} for both"
        )
    return width


def _fields(text: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copies of text[start:stop] behind one another, and the boundaries between them."""
    lengths = stops - starts
    return text[ranges(starts, lengths)], np.concatenate([[0], np.cumsum(lengths)])


def _check_not_empty(name: str, kind: str, lines: np.ndarray, boundaries: np.ndarray) -> None:
    empty = np.flatnonzero(np.diff(boundaries) == 0)
    if len(empty):
        raise SourceError(f"{name}: line {lines[empty[0]]}: expected a {kind}, got an empty column")


def _numbered(name: str, lines: np.ndarray, labels: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Places of labels in the list of those that occur, and this list."""
    lengths = np.diff(ends)
    longest = int(lengths.argmax())
    if lengths[longest] > _MAX_LABEL_BYTES:
        raise SourceError(
            f"{name}: line {lines[longest]}: expected a label of at most {_MAX_LABEL_BYTES} bytes, got "
            f"{lengths[longest]}: is this the column of the labels?"
        )
    width = int(lengths[longest])
    table = np.zeros((len(lengths), width), dtype=np.uint8)
    table[np.arange(width) < lengths[:, None]] = labels
    found, inverse = np.unique(table.view(f"S{width}").ravel(), return_inverse=True)
    return _in_order([label.decode() for label in found.tolist()], inverse)


def _in_order(names: Sequence[str], ids: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Labels with "O" first and those of one type behind one another; ids are places in the old list."""
    ordered = sorted(names, key=lambda label: (label != "O", label[2:] if label[1:2] == "-" else label, label))
    place = {label: index for index, label in enumerate(ordered)}
    return np.array([place[label] for label in names], dtype=np.int32)[ids], ordered


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
        occurring = sorted(set(labels))
        place = {label: index for index, label in enumerate(occurring)}
        return _in_order(occurring, np.array([place[label] for label in labels], dtype=np.int64))
    if names is None:
        raise SourceError(f"{table.name}: {column}: expected strings, or numbers that the features of a data set name")
    is_number = all(isinstance(label, Integral) and not isinstance(label, bool) for label in labels)
    if not is_number or not 0 <= min(labels) <= max(labels) < len(names):
        raise SourceError(f"{table.name}: {column}: expected numbers from 0 to {len(names) - 1}, got others")
    return np.array(labels, dtype=np.int32), list(names)
