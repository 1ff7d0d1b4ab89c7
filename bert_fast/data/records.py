"""Records of text files, each with its line: TSV, CSV and JSON lines in UTF-8."""

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from bert_fast.errors import SourceError
from bert_fast.files import open_regular, path_name

TABLES, JSON_LINES = (".tsv", ".txt", ".csv"), (".json", ".jsonl", ".ndjson")
_MAX_FIELD_CHARS = (1 << 31) - 1  # of CSV; what a C long holds everywhere
_UTF8_BOM = b"\xef\xbb\xbf"
# first bytes -> what the file is
_FOREIGN = {
    b"\xff\xfe": "UTF-16 or UTF-32",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"\xfd7zXZ\x00": "xz",
    b"BZh91AY&SY": "bzip2",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet (read it with format 'parquet')",
}


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a file. Raises OSError, or SourceError for a directory."""
    name = path_name("data", path)
    if os.path.isdir(name):
        raise SourceError(f"{name}: expected a file, got a directory")
    with open_regular(name) as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a UTF-8 file, its line ends as they stand, without a byte order mark.

    Raises OSError if it cannot be read; SourceError if it is a directory, empty, not UTF-8 (with line and byte), or of
    another kind: UTF-16, gzip, Parquet, ...
    """
    name, content = os.fspath(path), read_bytes(path)
    start = check_start(name, content)
    if len(content) == start:
        raise SourceError(f"{name}: is empty")
    try:
        return content[start:].decode()
    except UnicodeDecodeError as error:
        place = start + error.start
        line = content.count(b"\n", 0, place) + 1
        raise SourceError(
            f"{name}: line {line}: expected UTF-8, got byte 0x{content[place]:02x} (byte {place} of the file)"
        ) from None


def check_start(name: str, content: bytes) -> int:
    """Refuses what is not UTF-8 text by its first bytes; returns the length of the byte order mark, if any."""
    first_bytes = content[:4096]
    for magic, what in _FOREIGN.items():
        if first_bytes.startswith(magic):
            raise SourceError(f"{name}: is {what}, expected UTF-8 text; convert or unpack it into a pipe and read '-'")
    if first_bytes.count(0) > len(first_bytes) // 4:
        raise SourceError(
            f"{name}: expected UTF-8 text, got many zero bytes: UTF-16 without a byte order mark, or no text at all"
        )
    return len(_UTF8_BOM) if first_bytes.startswith(_UTF8_BOM) else 0


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
    lines = io.StringIO(read_text(name), newline="\n")  # a CR stays what it is: before LF, or in quotes
    return _table(name, lines, is_named) if ending_of(name) in TABLES else json_objects(name, lines)


def json_objects(name: str, lines: Iterable[str], first_line: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line, object) of every line that is not blank; raises SourceError where a line is no JSON object."""
    parse = json.JSONDecoder().raw_decode  # json.loads takes twice as long on short records
    for number, line in enumerate(lines, first_line):
        text = line.strip()
        if not text:
            continue
        try:
            record, end = parse(text)
            if end < len(text):
                raise ValueError("Extra data behind the record")
            if not isinstance(record, dict):
                raise ValueError(f"this is a {type(record).__name__}")
        except (ValueError, RecursionError) as error:
            problem = getattr(error, "msg", error)  # without the place in this line alone, "line 1 column 13"
            raise SourceError(f"{name}: line {number}: expected a JSON object, got {text[:60]!r}: {problem}") from None
        yield number, record


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
