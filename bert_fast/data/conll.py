"""Sentences of words that each carry a label, in CoNLL columns.

-DOCSTART- -X- O            tokens   ["John", "ran"], ["Go"]
# a comment                 labels   ["B-PER", "O"],  ["O"]
John NNP B-PER              lines    [3, 4],          [6]
ran VBD O

Go VB O
"""

import os
import re
from collections.abc import Iterator
from typing import Any

from bert_fast.checks import check_integer
from bert_fast.data.records import read_text
from bert_fast.errors import SourceError
from bert_fast.files import path_name

_SPACES = " \t\r"
_GAP = re.compile(r"[ \t][ \t\r]*")  # between columns without tabs; other spaces may be part of a word
_LABELLED_ROW = re.compile(r"#(?: .*)?[ \t](?:O|[A-Z]-\S+)$", re.ASCII)


def read_conll(
    path: str | os.PathLike[str], *, word_column: int = 0, label_column: int | None = -1
) -> list[dict[str, list[Any]]]:
    """Reads a file in CoNLL columns: a word a line, a blank line between sentences.

    Columns are separated by a tab each if the first row has one, otherwise by any number of spaces; then words may hold
    no space. Every row has the same number of them. Lines of whitespace are blank; lines that begin with -DOCSTART-
    end a sentence, too. A line that begins with "# " is a comment; in a file without tabs only before the first word of
    a sentence, and not if it ends with a label (O, B-...): then "#" is a word.

    Args:
        path: the file: UTF-8, lines end with LF or CRLF.
        word_column: number of the column with the words, from 0; negative: from the end.
        label_column: likewise of the labels; None: no labels are read.

    Returns:
        A mapping for every sentence: tokens and labels (strings), and lines, the numbers of their lines.

    Raises:
        OSError, SourceError: see `read_text`; there is no word, a row has another number of columns than the first, a
            column is missing, or a cell is empty; the message names file and line.
    """
    name = path_name("data", path)
    chosen = {"tokens": check_integer("word_column", word_column)}
    if label_column is not None:
        chosen["labels"] = check_integer("label_column", label_column)
    sentences: list[dict[str, list[Any]]] = []
    width, is_inside = 0, False
    for line, columns in _rows(read_text(name)):
        if not columns:
            is_inside = False
            continue
        if not width:
            width = len(columns)
            places = {column % width for column in chosen.values() if -width <= column < width}
            if len(places) < len(chosen):
                expected = " and ".join(f"column {column} of {kind}" for kind, column in chosen.items())
                raise SourceError(f"{name}: line {line}: expected {expected}, got {width} columns")
        if len(columns) != width:
            raise SourceError(f"{name}: line {line}: expected {width} columns as before, got {len(columns)}")
        if not is_inside:
            sentences.append({kind: [] for kind in (*chosen, "lines")})
            is_inside = True
        for kind, column in chosen.items():
            if not columns[column]:
                raise SourceError(f"{name}: line {line}: expected {kind} in column {column}, got an empty column")
            sentences[-1][kind].append(columns[column])
        sentences[-1]["lines"].append(line)
    if not sentences:
        raise SourceError(f"{name}: expected a word a line, got no words")
    return sentences


def _rows(content: str) -> Iterator[tuple[int, list[str]]]:
    """(number of the line, its columns) for every word; no columns where a sentence ends."""
    lines = content.split("\n")
    rows = (line for line in lines if line.strip(_SPACES) and not line.startswith(("# ", "-DOCSTART-")))
    has_tabs = "\t" in next(rows, "").rstrip(_SPACES)
    begins_sentence = True
    for number, line in enumerate(lines, 1):
        solid = line.rstrip(_SPACES)
        if not solid or solid.startswith("-DOCSTART-"):
            begins_sentence = True
            yield number, []
        elif not line.startswith("# ") or (not has_tabs and (not begins_sentence or _LABELLED_ROW.match(solid))):
            begins_sentence = False
            yield number, solid.split("\t") if has_tabs else _GAP.split(solid.lstrip(_SPACES))
