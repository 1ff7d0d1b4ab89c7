"""Tables of examples, as fine-tuning data comes: TSV, CSV, JSON lines, Parquet, Hugging Face `datasets`, or a list.

    .tsv, .txt        a row a line, fields between tabs, no quoting: as GLUE's files
    .csv              RFC 4180: fields in "..." may hold commas, line ends and "" for "
    .jsonl, .ndjson   an object a line; so are .json files, as many that go by that name
    .parquet, .pq     needs pyarrow

TSV and CSV files have a header, whose names are the columns', unless all columns asked for are numbers: then there is
none, and the columns are "0", "1", ... Text is UTF-8, with or without a byte order mark; lines end with LF or CR LF.
"""

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bert_fast.data.arguments import check_column, sequence_of
from bert_fast.data.text_files import json_records, read_text_file
from bert_fast.data.text_sources import is_dataset, open_parquet
from bert_fast.errors import SourceError
from bert_fast.files import path_name

__all__ = ["Table", "is_unicode", "label_problem", "read_table"]

_MAX_FIELD_CHARS = (1 << 31) - 1  # of CSV; what a C long holds everywhere


class Table:
    """Rows of named columns, which know where they come from; `len(table)` is the number of rows, at least one.

    Args:
        name: of the file or data set, for messages.
        names: of the columns.
        length: number of rows.
        column: gives all values of a column.
        place: says in words where a row stands.
    """

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        length: int,
        column: Callable[[str], list[Any]],
        place: Callable[[int], str],
    ) -> None:
        self.name, self.names = name, tuple(names)
        self._length, self._column, self._place = length, column, place

    def __len__(self) -> int:
        return self._length

    def place(self, row: int) -> str:
        """Where a row stands, for messages: "train.tsv: line 17"."""
        return self._place(row)

    def values(self, column: str) -> list[Any]:
        """A column's values, one per row, as the format has them: always strings in TSV and CSV.

        Raises:
            SourceError: there is no such column, or a row lacks it.
        """
        self.check(column)
        return self._column(column)

    def texts(self, column: str) -> list[str]:
        """A column of strings.

        Raises:
            SourceError: see `values`; a value is no string, or not valid Unicode (half of a surrogate pair).
        """
        texts = self.values(column)
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise SourceError(f"{self.place(row)}: column {column!r}: expected a string, got {text!r}")
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            row = next(row for row, text in enumerate(texts) if not is_unicode(text))
            problem = f"expected Unicode, got half of a surrogate pair in {texts[row]!r}"
            raise SourceError(f"{self.place(row)}: column {column!r}: {problem}") from None
        return texts

    def check(self, *columns: str) -> None:
        """Raises SourceError if one of these columns is not there; the message lists those that are."""
        for column in columns:
            if not isinstance(column, str):
                raise TypeError(f"{self.name}: expected the name of a column, got {type(column).__name__}")
            if column not in self.names:
                is_mixed = column.isdecimal() and not all(name.isdecimal() for name in self.names)
                hint = " (a file without a header has columns 0, 1, ...)" if is_mixed else ""
                there = ", ".join(map(repr, self.names))
                raise SourceError(f"{self.name}: expected a column {column!r}, got {there}{hint}")


def read_table(source: Any, columns: Sequence[str] = (), *, argument: str = "source") -> Table:
    """Reads a table.

    Args:
        source: a path, whose ending says what it is; a `datasets.Dataset`; or a list of mappings.
        columns: those that will be asked for; the other rows and columns may hold anything.
        argument: what messages call `source`.

    Raises:
        OSError: a file is not there or may not be read.
        SourceError: the file is not what its ending says, not UTF-8, empty, or without one of the columns; a row has
            more or fewer fields than the header; Parquet without pyarrow.
        TypeError: another kind of source. ValueError: no file can have this name.
    """
    for place, column in enumerate(sequence_of("columns", columns)):
        check_column(f"columns[{place}]", column)
    has_header = not columns or not all(name.isdecimal() for name in columns)
    if isinstance(source, str | os.PathLike):
        name = path_name(argument, source)
        ending = os.path.splitext(name)[1].lower()
        if ending in (".tsv", ".txt"):
            table = _tsv(name, has_header)
        elif ending == ".csv":
            table = _csv(name, has_header)
        elif ending in (".jsonl", ".ndjson", ".json"):
            table = _json_lines(name)
        elif ending in (".parquet", ".pq"):
            table = _parquet(name)
        else:
            raise SourceError(f"{name}: expected a file that ends in .tsv, .txt, .csv, .jsonl, .json or .parquet")
    elif isinstance(source, Mapping):
        raise TypeError(f"{argument}: expected one table, got several: {', '.join(map(repr, source))}")
    elif hasattr(source, "column_names") and hasattr(source, "__len__") and not isinstance(source, type):
        table = _dataset(source)
    elif isinstance(source, Sequence) and not isinstance(source, bytes):
        table = _mappings(source, argument)
    else:
        raise TypeError(
            f"{argument}: expected a path, a datasets.Dataset or a list of mappings, got {type(source).__name__}"
        )
    if len(table) == 0:
        raise SourceError(f"{table.name}: expected at least one row, got none")
    table.check(*columns)
    return table


def _tsv(name: str, has_header: bool) -> Table:
    content = read_text_file(name)
    lines = content.removesuffix("\n").split("\n")
    if "\r" in content:
        lines = [line[:-1] if line.endswith("\r") else line for line in lines]
    # All fields in one list: a list for every line costs as much as all the rest.
    widths = [line.count("\t") + 1 for line in lines]
    return _fields(name, "\t".join(lines).split("\t"), widths, range(1, len(lines) + 1), has_header)


def _csv(name: str, has_header: bool) -> Table:
    content = io.StringIO(read_text_file(name), newline="\n")  # a CR stays what it is: before LF, or in quotes
    reader = csv.reader(content, strict=True)
    fields: list[str] = []
    widths, lines, line = [], [], 1
    with _long_fields():
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise SourceError(f"{name}: line {line}: expected comma-separated fields (RFC 4180): {error}") from None
            if row is None:
                break
            fields += row or [""]
            widths.append(max(1, len(row)))
            lines.append(line)
            line = reader.line_num + 1  # a field in quotes may hold line ends
    return _fields(name, fields, widths, lines, has_header)


@contextmanager
def _long_fields() -> Iterator[None]:
    """The csv module's limit of 131,072 characters a field, which is the process's, out of the way for a while."""
    before = csv.field_size_limit(_MAX_FIELD_CHARS)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _fields(name: str, fields: list[str], widths: list[int], lines: Sequence[int], has_header: bool) -> Table:
    """A table of rows of fields. Empty lines at the end do not count, unless there is one column only.

    Args:
        name: of the file.
        fields: of all rows, one behind the other.
        widths: how many every row has.
        lines: the number of each row's line.
        has_header: whether the first row holds the names of the columns.
    """
    width = widths[0]
    names = fields[:width] if has_header else [str(number) for number in range(width)]
    while width > 1 and widths[-1] == 1 and fields[-1] == "":
        del widths[-1], fields[-1]
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise SourceError(f"{name}: line 1: expected every column once in the header, got {twice[0]!r} twice")
    for found, line in zip(widths, lines, strict=False):
        if found != width:
            these = ", ".join(map(repr, names)) if has_header else "as in line 1"
            raise SourceError(f"{name}: line {line}: expected {width} columns ({these}), got {found}")
    first = int(has_header)
    columns = {column: fields[place::width][first:] for place, column in enumerate(names)}
    return Table(
        name, names, len(widths) - first, columns.__getitem__, lambda row: f"{name}: line {lines[row + first]}"
    )


def _json_lines(name: str) -> Table:
    records: list[Mapping[str, Any]] = []
    lines: list[int] = []
    for line, record in json_records(name, read_text_file(name)):
        if not isinstance(record, dict):
            raise SourceError(f"{name}: line {line}: expected a JSON object, got {type(record).__name__}")
        records.append(record)
        lines.append(line)
    return _records(name, records, lambda row: f"{name}: line {lines[row]}")


def _mappings(records: Sequence[Mapping[str, Any]], argument: str) -> Table:
    for row, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise TypeError(f"{argument}[{row}]: expected a mapping, got {type(record).__name__}")
    return _records(argument, records, lambda row: f"{argument}[{row}]")


def _records(name: str, records: Sequence[Mapping[str, Any]], place: Callable[[int], str]) -> Table:
    """A table of mappings; a row may lack a column that nobody asks for."""

    def column(key: str) -> list[Any]:
        try:
            return [record[key] for record in records]
        except KeyError:
            row = next(row for row, record in enumerate(records) if key not in record)
            there = ", ".join(map(repr, records[row])) or "an empty object"
            raise SourceError(f"{place(row)}: expected a field {key!r}, got {there}") from None

    names = dict.fromkeys(key for record in records[:1] for key in record)
    return Table(name, [*names], len(records), column, place)


def _parquet(name: str) -> Table:
    with open_parquet(name) as file:
        names, length = file.schema_arrow.names, file.metadata.num_rows
    if length < 0:
        raise SourceError(f"{name}: is damaged: has {length} rows")

    def column(key: str) -> list[Any]:
        import pyarrow
        from pyarrow import parquet

        try:
            values: list[Any] = parquet.read_table(name, columns=[key]).column(0).to_pylist()
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError, IndexError) as error:
            raise SourceError(f"{name}: column {key!r} is damaged: {error}") from error
        if len(values) != length:
            raise SourceError(f"{name}: column {key!r} is damaged: expected {length} rows, got {len(values)}")
        return values

    return Table(name, names, length, column, lambda row: f"{name}: row {row}")


def _dataset(dataset: Any) -> Table:
    """A `datasets.Dataset`: classes by their names; -1, the class of unlabelled test rows there, is None."""
    features = getattr(dataset, "features", None) or {}

    def column(key: str) -> list[Any]:
        names = getattr(features.get(key), "names", None)
        if is_dataset(dataset):  # where Arrow keeps it: many times as fast as value by value
            values = dataset.with_format("arrow", columns=[key])[:].column(key).to_pylist()
        else:
            values = list(dataset[key])
        return values if names is None else [class_name(row, names, value) for row, value in enumerate(values)]

    def class_name(row: int, names: Sequence[str], value: int | None) -> str | None:
        if value is None or value == -1:
            return None
        if not 0 <= value < len(names):
            raise SourceError(f"dataset[{row}]: expected one of {len(names)} classes, got {value}")
        return names[value]

    return Table("dataset", dataset.column_names, len(dataset), column, lambda row: f"dataset[{row}]")


def label_problem(label: str) -> str | None:
    """What is wrong with the name of a class, for messages; None: nothing."""
    if not label.strip():
        return f"expected a label, got an empty one: {label!r}"
    if not is_unicode(label):
        return f"expected Unicode, got half of a surrogate pair in {label!r}"
    return None


def is_unicode(text: str) -> bool:
    """Whether it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
