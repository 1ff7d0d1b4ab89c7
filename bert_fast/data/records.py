"""Records of text files, each with its line: TSV, CSV and JSON lines in UTF-8."""

import csv
import io
import os
from collections.abc import Iterator
from typing import Any

from bert_fast.data.text_files import json_records, read_text_file
from bert_fast.errors import SourceError
from bert_fast.files import open_regular, path_name

__all__ = ["JSON_LINES", "TABLES", "ending_of", "read_bytes", "read_text", "records"]

TABLES, JSON_LINES = (".tsv", ".txt", ".csv"), (".json", ".jsonl", ".ndjson")
_MAX_FIELD_CHARS = (1 << 31) - 1  # of CSV; what a C long holds everywhere


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a file. Raises OSError, or SourceError for a directory."""
    name = path_name("data", path)
    _check_file(name)
    with open_regular(name) as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns `read_text_file(path)`; raises SourceError for a directory, too."""
    _check_file(path_name("data", path))
    return read_text_file(path)


def ending_of(name: str) -> str:
    """Returns the ending of a file's name with its dot, in small letters."""
    return os.path.splitext(name)[1].lower()


def records(name: str, is_named: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line, values by column) of every row.

    Args:
        name: of the file; its ending is one of `TABLES` or `JSON_LINES`.
        is_named: whether the first row of a table holds the names of the columns; otherwise they are "0", "1", ...

    Raises:
        OSError: the file cannot be read.
        SourceError: see `read_text`; a line is no JSON object, or has other columns than the first.
    """
    content = read_text(name)
    if ending_of(name) in TABLES:
        yield from _table(name, io.StringIO(content, newline="\n"), is_named)  # a CR stays: before LF, or in quotes
        return
    for line, record in json_records(name, content):
        if not isinstance(record, dict):
            raise SourceError(f"{name}: line {line}: expected a JSON object, got {type(record).__name__}")
        yield line, record


def _check_file(name: str) -> None:
    if os.path.isdir(name):
        raise SourceError(f"{name}: expected a file, got a directory")


def _table(name: str, lines: io.StringIO, is_named: bool) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of as many fields as the first. Empty lines do not count, unless there is one column only."""
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_FIELD_CHARS))  # of the process: 131,072 unless told otherwise
    options: dict[str, Any] = {} if ending_of(name) == ".csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    reader = csv.reader(lines, strict=True, **options)
    header, line = list[str](), 1
    try:
        for fields in reader:
            if line == 1:
                header = (fields or [""]) if is_named else [str(number) for number in range(max(1, len(fields)))]
                if len(set(header)) < len(header):
                    raise SourceError(f"{name}: line 1: expected every column once, got {', '.join(map(repr, header))}")
            if fields and len(fields) != len(header):
                raise SourceError(
                    f"{name}: line {line}: expected {len(header)} columns as in line 1, got {len(fields)}"
                )
            if (line > 1 or not is_named) and (fields or len(header) == 1):
                yield line, dict(zip(header, fields or [""], strict=True))
            line = reader.line_num + 1  # a field in quotes may hold line ends
    except csv.Error as error:
        problem = str(error).partition(" - ")[0]  # behind it is advice for programmers
        raise SourceError(f"{name}: line {line}: expected fields of a table: {problem}") from None
