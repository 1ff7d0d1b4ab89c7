"""A column of Parquet files, read through pyarrow one row group at a time. A position is [row group, row in it]."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bert_fast.data.text_blocks import Block, ReadOptions, Source
from bert_fast.data.text_sources_arrow import bytes_of, check_utf8, is_text
from bert_fast.errors import SourceError

__all__ = ["check", "read_blocks"]


def check(source: Source, field: str) -> None:
    """Opens the file and looks for the column.

    Raises:
        SourceError: pyarrow is not installed, the file is no Parquet file, or it has no such column of strings.
    """
    _open(source, field).close()


def read_blocks(source: Source, options: ReadOptions, position: Sequence[int] = ()) -> Iterator[Block]:
    """Every row is a text, handed on where Arrow keeps it; null is an empty one.

    The compressed column of one row group has to fit into memory; it is decoded batch by batch.

    Raises:
        SourceError: see `bert_fast.data.text_sources.read_blocks`; a damaged file.
    """
    first_group, first_row = position or (0, 0)
    with _open(source, options.field) as file:
        metadata = file.metadata
        row_of_file = sum(metadata.row_group(group).num_rows for group in range(first_group)) + first_row
        for group in range(first_group, metadata.num_row_groups):
            start = first_row if group == first_group else 0
            for texts in _columns(file, source.name, group, start, options):
                data, boundaries = bytes_of(texts)
                if options.errors == "strict":
                    check_utf8(source.name, data, boundaries, row_of_file)
                start, row_of_file = start + len(texts), row_of_file + len(texts)
                bytes_on_disk = (source.size or 0) * row_of_file // max(1, metadata.num_rows)
                yield Block((data, boundaries), [group, start], len(data), bytes_on_disk, False)
        nothing = (np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64))
        yield Block(nothing, [metadata.num_row_groups, 0], 0, source.size or 0, True)


def _columns(file: Any, name: str, group: int, first_row: int, options: ReadOptions) -> Iterator[Any]:
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


def _open(source: Source, field: str) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet, types
    except ImportError as error:
        raise SourceError(f"{source.name}: Parquet needs pyarrow: pip install 'bert_fast[parquet]' ({error})") from None
    try:
        file = parquet.ParquetFile(source.name, pre_buffer=False)
        schema = file.schema_arrow
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # names of columns that are not UTF-8
        raise SourceError(f"{source.name}: cannot be read as Parquet: {error}") from error
    found = schema.field(field).type if schema.names.count(field) == 1 else None
    if found is None:
        problem = f"expected one column {field!r}, got {', '.join(map(repr, schema.names))}"
    elif not is_text(found.value_type if types.is_dictionary(found) else found):
        problem = f"expected strings in the column {field!r}, got {found}"
    else:
        return file
    file.close()
    raise SourceError(f"{source.name}: {problem}")


def _batch_rows(file: Any, group: int, options: ReadOptions) -> int:
    """How many rows make a block of about `block_bytes`, by the size that the row group states for the column."""
    # pyarrow ends the process where it is asked about a column that is described wrongly; where it reads, it raises.
    next(file.iter_batches(1, [group], [options.field], use_threads=False), None)
    row_group, schema = file.metadata.row_group(group), file.schema
    places = [place for place in range(row_group.num_columns) if schema.column(place).path == options.field]
    size = sum(row_group.column(place).total_uncompressed_size for place in places)
    mean = max(1, size // max(1, row_group.num_rows))
    return max(1, min(row_group.num_rows, options.block_bytes // mean))
