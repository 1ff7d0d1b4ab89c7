"""Rows of examples as a `datasets.Dataset`: of a file, another data set, or a list of mappings.

    .tsv, .txt                a row a line, fields between tabs, no quoting: as GLUE's files
    .csv                      RFC 4180: fields in "..." may hold commas, line ends, and "" for "
    .json, .jsonl, .ndjson    an object a line
    .parquet                  Apache Parquet

All cells of TSV and CSV files are strings, as they stand: "01", "NA" and "" remain. These files have a header, unless
all columns asked for are numbers: then the columns are "0", "1", ... Files are read into memory; nothing is written.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from bert_fast.data.records import JSON_LINES, TABLES, ending_of, read_bytes, records
from bert_fast.errors import SourceError
from bert_fast.files import path_name

if TYPE_CHECKING:
    import datasets

_PARQUET = ".parquet"


def read_rows(data: Any, columns: Sequence[str], *, optional: Sequence[str] = ()) -> "datasets.Dataset":
    """Returns the rows with these columns, and no others.

    Args:
        data: a path, a `datasets.Dataset`, or a list of mappings.
        columns: columns that must be there.
        optional: columns that are kept where they are there.

    Raises:
        ImportError: `datasets` is not installed.
        OSError: the file is not there or cannot be read.
        SourceError: the file is not what its ending says, not UTF-8, or has no row; a column is missing, or holds
            values of several types. The message names the file, and the line where there is one.
        TypeError: `data`, or the name of a column, is of another kind.
    """
    try:
        import datasets
        import pyarrow
    except ImportError as error:
        raise ImportError(f"reading examples needs datasets: pip install bert_fast[train] ({error})") from None
    for column in (*columns, *optional):
        if not isinstance(column, str):
            raise TypeError(f"columns: expected names of columns, got {type(column).__name__}")
    name, is_named = _name(data), _is_named(columns)
    rows = data.with_format(None) if isinstance(data, datasets.Dataset) else _read(data, is_named)
    if not len(rows):
        raise SourceError(f"{name}: expected at least one row, got none")
    there = [*dict.fromkeys(key for row in rows for key in row)] if isinstance(rows, list) else rows.column_names
    for column in columns:
        if column not in there:
            hint = " (a file without a header has columns 0, 1, ...)" if is_named and column.isdecimal() else ""
            raise SourceError(f"{name}: expected a column {column!r}, got {', '.join(map(repr, there))}{hint}")
    kept = [column for column in dict.fromkeys([*columns, *optional]) if column in there]
    if not isinstance(rows, list):
        return rows.select_columns(kept)
    return datasets.Dataset(pyarrow.table({key: _array(data, key, [row.get(key) for row in rows]) for key in kept}))


def column_values(rows: "datasets.Dataset", column: str) -> list[Any]:
    """Returns a column as Python objects; classes by their names, None for -1, the class of unlabelled rows."""
    values: list[Any] = rows.with_format("arrow")[:][column].to_pylist()
    feature = rows.features[column]
    classes = getattr(getattr(feature, "feature", feature), "names", None)
    if classes is None:
        return values
    names = dict(enumerate(classes))
    return [[*map(names.get, value)] if isinstance(value, list) else names.get(value) for value in values]


def column_texts(data: Any, rows: "datasets.Dataset", column: str) -> list[str]:
    """Returns a column of strings of `rows`, which were read from `data`; raises SourceError where a value is none."""
    values = column_values(rows, column)
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise value_error(data, row, column, f"expected a string, got {value!r}")
    return values


def value_error(data: Any, row: int, column: str, problem: str) -> SourceError:
    """Returns the error for a value in row `row` (from 0) of what `read_rows` read from `data`.

    Its message is "train.tsv: line 17: column 'label': " and the problem: what was expected, and what came.
    """
    place = f"{_name(data)}[{row}]"
    if isinstance(data, str | os.PathLike) and ending_of(_name(data)) != _PARQUET:
        line, _ = next(islice(records(_name(data), _is_named([column])), row, None))  # only errors need their line
        place = f"{_name(data)}: line {line}"
    return SourceError(f"{place}: column {column!r}: {problem}")


def _name(data: Any) -> str:
    return path_name("data", data) if isinstance(data, str | os.PathLike) else "data"


def _is_named(columns: Sequence[str]) -> bool:
    """Whether a header names the columns of a table."""
    return not columns or not all(column.isdecimal() for column in columns)


def _read(data: Any, is_named: bool) -> "list[Mapping[str, Any]] | datasets.Dataset":
    if isinstance(data, str | os.PathLike):
        name = _name(data)
        if ending_of(name) == _PARQUET:
            return _read_parquet(name)
        if ending_of(name) in TABLES + JSON_LINES:
            return [record for _, record in records(name, is_named)]
        raise SourceError(f"{name}: expected a file that ends in {', '.join((*TABLES, *JSON_LINES, _PARQUET))}")
    if isinstance(data, bytes) or not isinstance(data, Sequence):
        raise TypeError(f"data: expected a path, a datasets.Dataset or a list of mappings, got {type(data).__name__}")
    for row, record in enumerate(data):
        if not isinstance(record, Mapping):
            raise TypeError(f"data[{row}]: expected a mapping, got {type(record).__name__}")
    return [*data]


def _read_parquet(name: str) -> "datasets.Dataset":
    import datasets
    import pyarrow
    from pyarrow import parquet

    content = pyarrow.BufferReader(read_bytes(name))
    try:
        table = parquet.read_table(content)
        table.validate(full=True)  # strings are UTF-8
        return datasets.Dataset(table)
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise SourceError(f"{name}: cannot be read as Parquet: {error}") from None


def _array(data: Any, column: str, values: list[Any]) -> Any:
    """A column as an Arrow array; raises SourceError for the first value that does not go together with the others."""
    import pyarrow

    errors = (pyarrow.ArrowException, UnicodeError, OverflowError)
    with suppress(*errors):
        return pyarrow.array(values)
    first = next(value for value in values if value is not None)
    for row, value in enumerate(values):
        try:
            pyarrow.array([first, value])
        except errors as error:
            problem = f"expected a value like {first!r}, got {value!r} ({error})"
            raise value_error(data, row, column, problem) from None
    raise SourceError(f"{_name(data)}: column {column!r}: expected values of one type")
