"""Where a token store's texts come from: files, streams and data sets of any size, read block by block.

Lines go to the tokenizer as the bytes that were read, columns of Parquet files and data sets as Arrow keeps them: no
string is made. Only a text in JSON lines becomes a Python object. A position, where reading goes on, is [bytes, lines,
CRC-32 of these bytes] in text (the CRC-32 of streams only, which are read again from the start; 0 in files),
[row group, row in it] in Parquet, [row] in a data set.
"""

import codecs
import os
import reprlib
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bert_fast.checks import check_count
from bert_fast.data.records import check_start, json_objects
from bert_fast.errors import SourceError
from bert_fast.files import path_name

# name -> what is a document
FORMATS = {
    "text": "a sentence a line; an empty line (one without tokens) and the end of the file end the document",
    "lines": "every line is a document",
    "jsonl": "JSON lines, every record is a document: the string in its field --field",
    "parquet": "Parquet, every row is a document: the string in the column --field",
}
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
_MAX_LINE_BYTES = 1 << 31  # a line has to fit into memory several times
_PIECE_BYTES = 1 << 20  # searched for line ends at a time: fits into the processor's cache
_LF = ord("\n")
_STRINGS = ("string", "large_string", "string_view", "binary", "large_binary")  # types of Arrow


@dataclass(frozen=True)
class TextSource:
    """A file, a stream or a data set.

    Args:
        name: its path as given; "-" is stdin; of a data set its fingerprint.
        format: a key of `FORMATS`, or "dataset".
        size: in bytes; None for streams (stdin, pipes), which cannot be read twice.
        mtime_ns: when it was changed last; None for streams and data sets.
        dataset: the `datasets.Dataset`, where it is one.
    """

    name: str
    format: str
    size: int | None = None
    mtime_ns: int | None = None
    dataset: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read.

    Args:
        field: key of the text in JSON lines, column of Parquet files and data sets.
        errors: "strict": bytes that are not UTF-8 raise; "replace": every maximal invalid part counts as one U+FFFD,
            which the tokenizer then drops (unless it was made with clean_text=False).
        block_bytes: about how many bytes are read at a time, 16 to 2^31; a longer line is read whole.

    Raises:
        TypeError, ValueError: an argument of another kind or out of its range.
    """

    field: str = "text"
    errors: str = "strict"
    block_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if not isinstance(self.field, str):
            raise TypeError(f"field: expected a str, got {type(self.field).__name__}")
        if not isinstance(self.errors, str) or self.errors not in ("strict", "replace"):
            raise ValueError(f"errors: expected 'strict' or 'replace', got {reprlib.repr(self.errors)}")
        object.__setattr__(self, "block_bytes", check_count("block_bytes", self.block_bytes, 16, 1 << 31))


@dataclass(frozen=True)
class Block:
    """Some texts of a source, as many as one call of the tokenizer takes.

    Args:
        texts: as `Tokenizer.encode_ragged` takes them: of lines (bytes as uint8, boundaries), of records a list of
            strings, of columns an Arrow array.
        position: where the source is read on behind this block.
        num_bytes: of text.
        bytes_on_disk: of the source, up to here.
        ends_source: whether nothing follows; every source ends with such a block, which may be without texts.
    """

    texts: Any
    position: list[int]
    num_bytes: int
    bytes_on_disk: int
    ends_source: bool


def find_sources(names: Any, format: str = "auto", field: str = "text") -> list[TextSource]:
    """Looks at all files before any is read.

    Args:
        names: paths, "-" for stdin, or `datasets.Dataset`s.
        format: a key of `FORMATS`, or "auto": by the ending of the name, "text" where that says nothing.
        field: the column that Parquet files and data sets must have.

    Raises:
        OSError: a file is not there or may not be read.
        SourceError: a directory; a Parquet file or data set without the column; stdin twice.
        TypeError: names is no list, or holds something else. ValueError: another format.
    """
    if isinstance(names, str | bytes) or not isinstance(names, Sequence | Iterator):
        raise TypeError(f"files: expected a list of paths and data sets, got {type(names).__name__}")
    if not isinstance(format, str) or format not in ("auto", *FORMATS):
        raise ValueError(f"format: expected 'auto', {', '.join(map(repr, FORMATS))}, got {reprlib.repr(format)}")
    sources = [_find(name, format, field) for name in names]
    if sum(source.name == "-" for source in sources) > 1:
        raise SourceError("-: stdin can be read only once")
    return sources


def _find(file: Any, format: str, field: str) -> TextSource:
    if "datasets" in sys.modules and isinstance(file, sys.modules["datasets"].Dataset):
        name = f"dataset {file._fingerprint}"  # follows its content and its rows: it is known again by this
        _check_column(name, file.features.arrow_schema, field)
        return TextSource(name, "dataset", file.data.nbytes, dataset=file)
    name = path_name("files", file)
    if format == "auto":
        format = _SUFFIXES.get(os.path.splitext(name)[1].lower(), "text")
    status = None if name == "-" else os.stat(name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise SourceError(f"{name}: is a directory; pass the files in it")
    if status is None or not stat.S_ISREG(status.st_mode):
        if format == "parquet":
            raise SourceError(f"{name}: Parquet cannot be read from a stream")
        return TextSource(name, format)
    with _open_parquet(name, field) if format == "parquet" else open(name, "rb"):  # raises now if it cannot be read
        return TextSource(name, format, status.st_size, status.st_mtime_ns)


def read_blocks(source: TextSource, options: ReadOptions, position: Sequence[int] = ()) -> Iterator[Block]:
    """The texts of a source, from its start or from the position of an earlier block on.

    Of lines every one is a text, together with its line end, which is whitespace to the tokenizer (as is CR before
    LF). Of records and rows null is an empty text. The texts do not depend on `options.block_bytes`, nor on where
    reading was interrupted.

    Raises:
        SourceError: the source is not what its format says, or not UTF-8 with errors="strict"; a file was changed while
            it was read; a stream does not begin with what was read of it before `position`.
    """
    readers = {"parquet": _parquet_blocks, "dataset": _dataset_blocks}
    for block in readers.get(source.format, _line_blocks)(source, options, position):
        if block.ends_source and source.mtime_ns is not None:
            status = os.stat(source.name)
            if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
                raise SourceError(f"{source.name}: was changed while it was read")
        yield block


def check_stream(source: TextSource, num_bytes: int, checksum: int) -> None:
    """Reads a stream to its end and sees that it is `num_bytes` long with this CRC-32; raises SourceError if not."""
    with _open(source.name) as file:
        _skip(file, source.name, num_bytes, checksum)
        if file.read(1):
            raise SourceError(f"{source.name}: expected a stream of {num_bytes} bytes, as it was before, got more")


def _open(name: str) -> Any:
    return open(0 if name == "-" else name, "rb", closefd=name != "-")


def _skip(file: Any, name: str, num_bytes: int, checksum: int) -> None:
    """Reads what was read from this stream before, and sees that it is the same."""
    found = done = 0
    while piece := file.read(min(num_bytes - done, _PIECE_BYTES)):
        found, done = zlib.crc32(piece, found), done + len(piece)
    if (done, found) != (num_bytes, checksum):
        raise SourceError(
            f"{name}: a stream that is read on must begin with the {num_bytes} bytes that were read before; "
            f"got {'other bytes' if done == num_bytes else f'only {done} bytes'}"
        )


def _line_blocks(source: TextSource, options: ReadOptions, position: Sequence[int]) -> Iterator[Block]:
    """Blocks of whole lines; only the last line of a source may lack its end."""
    num_bytes, num_lines, checksum = position or (0, 0, 0)
    with _open(source.name) as file:
        if source.size is None:
            _skip(file, source.name, num_bytes, checksum)
        else:
            file.seek(num_bytes)
        rest, ends_source = b"", False  # the beginning of a line whose end is not read yet
        while not ends_source:
            # A line that does not fit into a block is read on in ever larger steps: its copies cost linear time.
            wanted = max(options.block_bytes, len(rest))
            piece = file.read(wanted)
            ends_source, data = len(piece) < wanted, rest + piece
            start = 0 if num_bytes else check_start(source.name, data)
            stop = len(data) if ends_source else data.rfind(b"\n") + 1
            if stop <= start and not ends_source:
                if len(data) > _MAX_LINE_BYTES:
                    raise SourceError(f"{source.name}: line {num_lines + 1} has more than {_MAX_LINE_BYTES} bytes")
                rest = data
                continue
            lines, rest = np.frombuffer(data, np.uint8)[start:stop], data[stop:]
            texts = _texts_of_lines(lines, source, options, num_bytes + start, num_lines)
            num_bytes, num_lines = num_bytes + stop, num_lines + data.count(b"\n", start, stop)
            checksum = zlib.crc32(data[:stop], checksum) if source.size is None else 0
            yield Block(texts, [num_bytes, num_lines, checksum], len(lines), num_bytes, ends_source)


def _texts_of_lines(
    lines: np.ndarray, source: TextSource, options: ReadOptions, bytes_before: int, lines_before: int
) -> Any:
    if options.errors == "strict" or source.format == "jsonl":
        try:
            content = codecs.utf_8_decode(lines.data, options.errors, True)[0]
        except UnicodeDecodeError as error:
            line = lines_before + int(np.count_nonzero(lines[: error.start] == _LF)) + 1
            place = f"byte {bytes_before + error.start} (line {line}) is 0x{lines[error.start]:02x}"
            raise SourceError(f"{source.name}: not UTF-8: {place}; errors='replace' reads on") from None
    if source.format == "jsonl":
        return list(_json_texts(content, options.field, source.name, lines_before))
    pieces = range(0, len(lines), _PIECE_BYTES)
    stops = [np.flatnonzero(lines[first : first + _PIECE_BYTES] == _LF) + (first + 1) for first in pieces]
    boundaries = np.concatenate([np.zeros(1, np.int64), *stops])
    return lines, boundaries if boundaries[-1] == len(lines) else np.append(boundaries, len(lines))


def _json_texts(content: str, field: str, name: str, lines_before: int) -> Iterator[str]:
    for line, record in json_objects(name, content.split("\n"), lines_before + 1):
        value = record.get(field, record)  # the record itself stands for a field that is not there
        if value is not None and type(value) is not str:
            got = reprlib.repr(record)
            raise SourceError(f"{name}: line {line}: expected a string in the field {field!r}, got {got}")
        yield value or ""


def _parquet_blocks(source: TextSource, options: ReadOptions, position: Sequence[int]) -> Iterator[Block]:
    """The compressed column of one row group has to fit into memory; it is decoded batch by batch."""
    import pyarrow

    first_group, rows_done = position or (0, 0)
    with _open_parquet(source.name, options.field) as file:
        groups, size = [file.metadata.row_group(group) for group in range(file.num_row_groups)], source.size or 0
        num_rows = max(1, sum(group.num_rows for group in groups))
        rows_before = sum(group.num_rows for group in groups[:first_group])
        for index, group in enumerate(groups[first_group:], first_group):
            step = max(1, min(group.num_rows, options.block_bytes * group.num_rows // max(1, group.total_byte_size)))
            row = 0
            try:
                for batch in file.iter_batches(step, [index], [options.field], use_threads=False):
                    first, row = max(row, rows_done), row + len(batch)
                    if first < row:
                        texts, on_disk = batch.column(0)[first - row :], size * (rows_before + row) // num_rows
                        yield _column_block(source.name, texts, options, rows_before + first, [index, row], on_disk)
            except (pyarrow.ArrowException, OSError) as error:
                raise SourceError(f"{source.name}: row group {index} is damaged behind row {row}: {error}") from error
            rows_before, rows_done = rows_before + row, 0
        yield Block([], [len(groups), 0], 0, size, True)


def _dataset_blocks(source: TextSource, options: ReadOptions, position: Sequence[int]) -> Iterator[Block]:
    rows = source.dataset.with_format("arrow", columns=[options.field])
    num_rows, size = len(rows), source.size or 0
    step = max(1, options.block_bytes * num_rows // max(size, 1))
    for first in range(position[0] if position else 0, num_rows, step):
        end = min(first + step, num_rows)
        texts = rows[first:end].column(options.field).combine_chunks()
        yield _column_block(source.name, texts, options, first, [end], size * end // num_rows)
    yield Block([], [num_rows], 0, size, True)


def _column_block(
    name: str, texts: Any, options: ReadOptions, first_row: int, position: list[int], bytes_on_disk: int
) -> Block:
    """The block of an Arrow array whose first row is row `first_row` of the source."""
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    texts = texts.cast(pyarrow.large_binary()).fill_null(b"")
    if options.errors == "strict":
        try:
            texts.cast(pyarrow.large_string())
        except pyarrow.ArrowInvalid:
            _refuse_broken(name, texts.to_pylist(), first_row)
    num_bytes = compute.sum(compute.binary_length(texts)).as_py()
    return Block(texts, position, num_bytes, bytes_on_disk, False)


def _refuse_broken(name: str, texts: list[bytes], first_row: int) -> None:
    for row, text in enumerate(texts, first_row):
        try:
            text.decode()
        except UnicodeDecodeError as error:
            place = f"byte {error.start} of row {row} is 0x{text[error.start]:02x}"
            raise SourceError(f"{name}: not UTF-8: {place}; errors='replace' reads on") from None


def _open_parquet(name: str, field: str) -> Any:
    """A `pyarrow.parquet.ParquetFile` that has this one column of strings."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise SourceError(f"{name}: Parquet needs pyarrow: pip install 'bert_fast[parquet]' ({error})") from None
    try:
        file = parquet.ParquetFile(name, pre_buffer=False)
        _check_column(name, file.schema_arrow, field)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{name}: cannot be read as Parquet: {error}") from error
    return file


def _check_column(name: str, schema: Any, field: str) -> None:
    """Raises SourceError unless the schema has this one column of strings."""
    from pyarrow import types

    if schema.names.count(field) != 1:
        raise SourceError(f"{name}: expected one column {field!r}, got {', '.join(map(repr, schema.names))}")
    found = schema.field(field).type
    if str(found.value_type if types.is_dictionary(found) else found) not in _STRINGS:
        raise SourceError(f"{name}: expected strings in the column {field!r}, got {found}")
