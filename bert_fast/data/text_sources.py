"""Where a token store's texts come from: files, streams and data sets of any size, read block by block.

Columns of Parquet files (through pyarrow, one row group at a time; a position is [row group, row in it]) and of data
sets (a position is [row]) are handed to the tokenizer where Arrow keeps them, without a copy.
"""

import os
import reprlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bert_fast.data.text_files import (
    Block,
    ReadOptions,
    TextSource,
    check_field,
    find_invalid_utf8,
    read_json_blocks,
    read_line_blocks,
)
from bert_fast.errors import SourceError
from bert_fast.files import path_name

__all__ = ["FORMATS", "find_sources", "read_blocks"]

# name -> what is a document
FORMATS = {
    "text": "a sentence a line; an empty line (one without tokens) and the end of the file end the document",
    "lines": "every line is a document",
    "jsonl": "JSON lines, every record is a document: the string in its field --field",
    "parquet": "Parquet, every row is a document: the string in the column --field",
}
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}


def find_sources(names: Any, format: str = "auto", field: str = "text") -> list[TextSource]:
    """Looks at all files before any is read.

    Args:
        names: paths, "-" for stdin, or `datasets.Dataset`s.
        format: a key of `FORMATS`, or "auto": by the ending of the name, "text" where that says nothing.
        field: the column that Parquet files and data sets must have.

    Raises:
        OSError: a file is not there or may not be read.
        SourceError: a directory; a Parquet file or data set without the column; stdin twice.
        TypeError: names is no list, field no string. ValueError: another format.
    """
    try:
        names = None if isinstance(names, str | bytes | Mapping) else list(names)
    except (NotImplementedError, TypeError):  # sparse tensors cannot be iterated over
        names = None
    if names is None:
        raise TypeError("files: expected a list of paths and data sets")
    if not isinstance(format, str) or (format != "auto" and format not in FORMATS):
        got = repr(format) if isinstance(format, str) else reprlib.repr(format)
        raise ValueError(f"format: expected 'auto', {', '.join(map(repr, FORMATS))}, got {got}")
    check_field(field)
    sources = [
        _find_dataset(name, field) if _is_dataset(name) else _find_file(path_name("files", name), format)
        for name in names
    ]
    if sum(source.name == "-" for source in sources) > 1:
        raise SourceError("-: stdin can be read only once")
    for source in sources:
        if source.format == "parquet":
            _open_column(source.name, field).close()
    return sources


def _find_file(name: str, format: str) -> TextSource:
    if format == "auto":
        format = _SUFFIXES.get(os.path.splitext(name)[1].lower(), "text")
    status = None if name == "-" else os.stat(name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise SourceError(f"{name}: is a directory; pass the files in it")
    if status is not None and stat.S_ISREG(status.st_mode):
        with open(name, "rb"):  # raises now if it may not be read
            return TextSource(name, format, status.st_size, status.st_mtime_ns)
    if format == "parquet":
        raise SourceError(f"{name}: Parquet cannot be read from a stream")
    return TextSource(name, format)


def read_blocks(source: TextSource, options: ReadOptions, position: Sequence[int] = ()) -> Iterator[Block]:
    """The texts of a source, from its start or from the position of an earlier block on.

    The texts do not depend on `options.block_bytes`, nor on where reading was interrupted.

    Raises:
        SourceError: the source is not what its format says, or not UTF-8 with errors="strict"; a file was changed while
            it was read; a stream does not begin with what was read of it before `position`.
    """
    for block in _READERS[source.format](source, options, position):
        if block.ends_source and not source.is_stream and source.dataset is None:
            status = os.stat(source.name)
            if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
                raise SourceError(f"{source.name}: was changed while it was read")
        yield block


def _parquet_blocks(source: TextSource, options: ReadOptions, position: Sequence[int]) -> Iterator[Block]:
    """Every row is a text; null is an empty one.

    The compressed column of one row group has to fit into memory; it is decoded batch by batch.
    """
    first_group, first_row = position or (0, 0)
    with _open_column(source.name, options.field) as file:
        metadata = file.metadata
        row_of_file = sum(metadata.row_group(group).num_rows for group in range(first_group)) + first_row
        for group in range(first_group, metadata.num_row_groups):
            start = first_row if group == first_group else 0
            for texts in _row_group(file, source.name, group, start, options):
                start, row_of_file = start + len(texts), row_of_file + len(texts)
                bytes_on_disk = (source.size or 0) * row_of_file // max(1, metadata.num_rows)
                yield _block(source.name, texts, options, row_of_file, [group, start], bytes_on_disk)
        yield _last_block([metadata.num_row_groups, 0], source.size or 0)


def _dataset_blocks(source: TextSource, options: ReadOptions, position: Sequence[int]) -> Iterator[Block]:
    """Every row is a text; null is an empty one."""
    texts = source.dataset.with_format("arrow", columns=[options.field])
    num_rows, size = len(texts), source.size or 0
    step = max(1, options.block_bytes * num_rows // max(size, 1))
    for first in range(position[0] if position else 0, num_rows, step):
        end = min(first + step, num_rows)
        column = texts[first:end].column(options.field).combine_chunks()
        yield _block(source.name, column, options, end, [end], size * end // num_rows)
    yield _last_block([num_rows], size)


_READERS = {
    "text": read_line_blocks,
    "lines": read_line_blocks,
    "jsonl": read_json_blocks,
    "parquet": _parquet_blocks,
    "dataset": _dataset_blocks,
}


def _block(name: str, texts: Any, options: ReadOptions, end_row: int, position: list[int], bytes_on_disk: int) -> Block:
    """An Arrow array of texts whose last row stands before `end_row`."""
    import pyarrow

    if pyarrow.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    texts = texts.cast(pyarrow.large_binary())  # without a look at the bytes: UTF-8 or not is for `errors` to say
    if texts.null_count:
        texts = texts.fill_null(b"")
    _, offsets, content = texts.buffers()
    boundaries = np.frombuffer(offsets, dtype=np.int64, count=texts.offset + len(texts) + 1)[texts.offset :]
    data = np.frombuffer(content, dtype=np.uint8) if content is not None else np.empty(0, dtype=np.uint8)
    data, boundaries = data[boundaries[0] : boundaries[-1]], boundaries - boundaries[0]
    place = find_invalid_utf8(data) if options.errors == "strict" else None
    if place is not None:
        row = int(np.searchsorted(boundaries, place, side="right")) - 1
        raise SourceError(
            f"{name}: not UTF-8: byte {place - boundaries[row]} of row {end_row - len(texts) + row} is "
            f"0x{data[place]:02x}; errors='replace' reads on"
        )
    return Block((data, boundaries), position, len(data), bytes_on_disk, False)


def _last_block(position: list[int], size: int) -> Block:
    return Block((np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)), position, 0, size, True)


def _is_text(found: Any) -> bool:
    """Whether an Arrow type is one of strings or bytes, also where each different one is kept once."""
    from pyarrow import types

    if types.is_dictionary(found):
        found = found.value_type
    checks = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(check(found) for check in checks)


def _is_dataset(found: Any) -> bool:
    """Whether it is a `datasets.Dataset`: nobody has one who has not imported the package."""
    modules = {base.__module__.split(".")[0] for base in type(found).__mro__}
    return "datasets" in modules and hasattr(found, "with_format")


def _find_dataset(dataset: Any, field: str) -> TextSource:
    """The data set as a source; it is known again by its fingerprint, which follows its content and its rows."""
    fingerprint = getattr(dataset, "_fingerprint", None)
    if fingerprint is None:
        raise SourceError(f"{type(dataset).__name__}: expected a datasets.Dataset (streaming=False, one split)")
    name = f"dataset {fingerprint}"
    if field not in dataset.column_names:
        columns = ", ".join(map(repr, dataset.column_names))
        raise SourceError(f"{name}: expected one column {field!r}, got {columns}")
    found = dataset.features.arrow_schema.field(field).type
    if not _is_text(found):
        raise SourceError(f"{name}: expected strings in the column {field!r}, got {found}")
    return TextSource(name, "dataset", dataset.data.nbytes, dataset=dataset)


def _open_parquet(name: str) -> Any:
    """A `pyarrow.parquet.ParquetFile`, whose `schema_arrow` and `metadata` can be read.

    Raises:
        FileNotFoundError: there is no such file.
        SourceError: it is no Parquet file, or pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise SourceError(f"{name}: Parquet needs pyarrow: pip install 'bert_fast[parquet]' ({error})") from None
    try:
        file = parquet.ParquetFile(name, pre_buffer=False)
        file.schema_arrow, file.metadata  # noqa: B018  (names of columns that are not UTF-8 show here)
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{name}: cannot be read as Parquet: {error}") from error
    return file


def _open_column(name: str, field: str) -> Any:
    """Likewise; raises SourceError unless it has this one column of strings."""
    file = _open_parquet(name)
    schema = file.schema_arrow
    found = schema.field(field).type if schema.names.count(field) == 1 else None
    if found is None:
        problem = f"expected one column {field!r}, got {', '.join(map(repr, schema.names))}"
    elif not _is_text(found):
        problem = f"expected strings in the column {field!r}, got {found}"
    else:
        return file
    file.close()
    raise SourceError(f"{name}: {problem}")


def _row_group(file: Any, name: str, group: int, first_row: int, options: ReadOptions) -> Iterator[Any]:
    """Arrow arrays of a row group's texts, from a row on."""
    import pyarrow

    row = 0
    try:
        batch_rows = _batch_rows(file, group, options)
        for batch in file.iter_batches(batch_rows, [group], [options.field], use_threads=False):
            start, row = row, row + len(batch)
            if row > first_row:
                yield batch.column(0)[max(0, first_row - start) :]
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{name}: row group {group} is damaged behind row {row}: {error}") from error


def _batch_rows(file: Any, group: int, options: ReadOptions) -> int:
    """How many rows make a block of about `block_bytes`, by the size that the row group states for the column."""
    # pyarrow ends the process where it is asked about a column that is described wrongly; where it reads, it raises.
    next(file.iter_batches(1, [group], [options.field], use_threads=False), None)
    row_group, schema = file.metadata.row_group(group), file.schema
    places = [place for place in range(row_group.num_columns) if schema.column(place).path == options.field]
    size = sum(row_group.column(place).total_uncompressed_size for place in places)
    mean = max(1, size // max(1, row_group.num_rows))
    return max(1, min(row_group.num_rows, options.block_bytes // mean))
