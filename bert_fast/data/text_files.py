"""Files and streams of UTF-8 text: as a whole, or block by block; lines, and JSON lines.

A position, where reading goes on, is [bytes, lines, CRC-32 of these bytes]. The checksum is taken of streams only,
which have to be read again from the start; it is 0 for files.

Files are read into buffers rather than mapped into memory: it costs the same (the search for line ends is what takes
time), a file that another process shortens is an error message and no bus error, and pipes take the same path.
"""

import codecs
import json
import os
import reprlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bert_fast.checks import check_integer
from bert_fast.errors import SourceError
from bert_fast.files import path_name

__all__ = [
    "Block", "ReadOptions", "TextSource", "check_field", "check_stream", "find_invalid_utf8", "json_records",
    "read_json_blocks", "read_line_blocks", "read_text_file",
]  # fmt: skip

# Texts of one call: strings, or bytes (uint8) with boundaries (int64 [n + 1]): text i is bytes[b[i]:b[i + 1]].
Texts = Sequence[str] | tuple[np.ndarray, np.ndarray]

MIN_BLOCK_BYTES = 16  # enough to tell by the first block what a file is
MAX_BLOCK_BYTES = 1 << 31
MAX_LINE_BYTES = 1 << 31  # a line has to fit into memory several times
_PIECE_BYTES = 1 << 20  # read at a time and searched for line ends while it is in the processor's cache
_SNIFFED_BYTES = 4096
_SHOWN_CHARS = 60  # how much of a wrong line a message shows
_LF = 10
_UTF8_BOM = b"\xef\xbb\xbf"
_MISSING = object()
_PIPE = "unpack it into a pipe and read '-'"
# first bytes -> what the file is, and what to do
_FOREIGN = (
    (b"\xff\xfe", "UTF-16 or UTF-32", "convert it to UTF-8, with iconv for one"),
    (b"\xfe\xff", "UTF-16", "convert it to UTF-8, with iconv for one"),
    (b"\x00\x00\xfe\xff", "UTF-32", "convert it to UTF-8, with iconv for one"),
    (b"\x1f\x8b", "gzip", _PIPE),
    (b"\x28\xb5\x2f\xfd", "Zstandard", _PIPE),
    (b"\xfd7zXZ\x00", "xz", _PIPE),
    (b"BZh91AY&SY", "bzip2", _PIPE),
    (b"PK\x03\x04", "a zip archive", _PIPE),
    (b"PAR1", "Parquet", "read it with format 'parquet'"),
)


@dataclass(frozen=True)
class TextSource:
    """A file, a stream or a data set.

    Args:
        name: its path as given; "-" is stdin; of a data set its fingerprint.
        format: see `bert_fast.data.text_sources.FORMATS`.
        size: in bytes; None for streams (stdin, pipes), which cannot be read twice.
        mtime_ns: when it was changed last; None for streams and data sets.
        dataset: the `datasets.Dataset`, where it is one.
    """

    name: str
    format: str
    size: int | None = None
    mtime_ns: int | None = None
    dataset: Any = field(default=None, compare=False, repr=False)

    @property
    def is_stream(self) -> bool:
        """Whether it can be read only once."""
        return self.size is None


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read.

    Args:
        field: key of the text in JSON lines, column of Parquet files.
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
        check_field(self.field)
        if not isinstance(self.errors, str) or self.errors not in ("strict", "replace"):
            raise ValueError(f"errors: expected 'strict' or 'replace', got {reprlib.repr(self.errors)}")
        block_bytes = check_integer("block_bytes", self.block_bytes)
        if block_bytes < MIN_BLOCK_BYTES:
            raise ValueError(f"block_bytes: expected {MIN_BLOCK_BYTES} or more, got {block_bytes}")
        if block_bytes > MAX_BLOCK_BYTES:
            raise ValueError(f"block_bytes: expected {MAX_BLOCK_BYTES} or fewer, got {block_bytes}")
        object.__setattr__(self, "block_bytes", block_bytes)


def check_field(name: Any) -> None:
    """Raises TypeError unless it can be the name of a field of records, or of a column."""
    if not isinstance(name, str):
        raise TypeError(f"field: expected a str, got {type(name).__name__}")


@dataclass(frozen=True)
class Block:
    """Some texts of a source, as many as one call of the tokenizer takes.

    Args:
        texts: see `Texts`.
        position: where the source is read on behind this block.
        num_bytes: of text.
        bytes_on_disk: of the source, up to here.
        ends_source: whether nothing follows; every source ends with such a block, which may be without texts.
    """

    texts: Texts
    position: list[int]
    num_bytes: int
    bytes_on_disk: int
    ends_source: bool


@dataclass(frozen=True)
class _Lines:
    """Whole lines.

    Args:
        data (uint8 [n]): the lines with their line ends; only the last one of a source may lack it.
        boundaries (int64 [k + 1]): line i is data[boundaries[i]:boundaries[i + 1]].
        first_byte: where they stand in the source.
        first_line: how many lines stand before them.
        position: where the source is read on behind them.
        ends_source: whether nothing follows.
    """

    data: np.ndarray
    boundaries: np.ndarray
    first_byte: int
    first_line: int
    position: list[int]
    ends_source: bool


def read_text_file(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, its line ends as they stand, a byte order mark left out.

    Raises:
        OSError: there is no such file, or it may not be read.
        SourceError: the file is empty, not UTF-8 (the message names byte and line), or of another kind: UTF-16, gzip,
            Parquet, ...
    """
    name = path_name("path", path)
    with open(name, "rb") as file:
        data = file.read()
    mark = _check_start(name, data[:_SNIFFED_BYTES])
    if len(data) == mark:
        raise SourceError(f"{name}: is empty")
    try:
        return data[mark:].decode()
    except UnicodeDecodeError as error:
        place = mark + error.start
        line = data.count(b"\n", 0, place) + 1
        raise SourceError(
            f"{name}: line {line}: expected UTF-8, got byte 0x{data[place]:02x} (byte {place} of the file)"
        ) from None


def read_line_blocks(source: TextSource, options: ReadOptions, position: Sequence[int] = ()) -> Iterator[Block]:
    """Every line is a text, together with its line end, which is whitespace to the tokenizer (as is CR before LF)."""
    for lines in _read_lines(source, options.block_bytes, position):
        if options.errors == "strict":
            _check_utf8(source.name, lines)
        texts = lines.data, lines.boundaries
        yield Block(texts, lines.position, len(lines.data), lines.position[0], lines.ends_source)


def _check_utf8(name: str, lines: _Lines) -> None:
    """Raises SourceError, with the place, if the lines are not UTF-8."""
    place = find_invalid_utf8(lines.data)
    if place is not None:
        line = lines.first_line + int(np.searchsorted(lines.boundaries, place, side="right"))
        raise SourceError(
            f"{name}: not UTF-8: byte {lines.first_byte + place} (line {line}) is 0x{lines.data[place]:02x}; "
            "errors='replace' reads on"
        )


def read_json_blocks(source: TextSource, options: ReadOptions, position: Sequence[int] = ()) -> Iterator[Block]:
    """Every record is a text, the string in one of its fields; null is an empty one; lines of whitespace are skipped.

    Raises:
        SourceError: see `bert_fast.data.text_sources.read_blocks`; a line is not one object with a string or null in
            the field.
    """
    for lines in _read_lines(source, options.block_bytes, position):
        texts = list(_texts(source.name, lines, options))
        yield Block(texts, lines.position, len(lines.data), lines.position[0], lines.ends_source)


def json_records(name: str, content: str, lines_before: int = 0) -> Iterator[tuple[int, Any]]:
    """(number of the line, what it holds) for every line of a text that is not blank.

    Raises:
        SourceError: a line is not JSON, or holds more than one value.
    """
    parse = json.JSONDecoder().raw_decode  # parses a record where it stands: no string is made for its line
    start, line = 0, lines_before
    while start < len(content):
        stop = content.find("\n", start)
        if stop < 0:
            stop = len(content)
        first, start, line = start, stop + 1, line + 1
        try:
            record, end = parse(content, first)
            if end != stop and not content[end:stop].isspace():
                raise ValueError("there is more behind the record, or it goes on in the next line")
        except (ValueError, RecursionError):
            text = content[first:stop].strip()
            if not text:
                continue
            record = _parse_alone(text, f"{name}: line {line}")  # spaces before a record are no error
        yield line, record


def _texts(name: str, lines: _Lines, options: ReadOptions) -> Iterator[str]:
    try:
        content = codecs.utf_8_decode(lines.data.data, options.errors, True)[0]
    except UnicodeDecodeError:
        _check_utf8(name, lines)
        raise
    for line, record in json_records(name, content, lines.first_line):
        value = record.get(options.field, _MISSING) if type(record) is dict else _MISSING
        if type(value) is str:
            yield value
        elif value is None:
            yield ""
        else:
            raise SourceError(f"{name}: line {line}: {_complaint(record, options.field)}")


def _read_lines(source: TextSource, block_bytes: int, position: Sequence[int] = ()) -> Iterator[_Lines]:
    """Blocks of about `block_bytes`; a line that is longer is read whole. What was yielded is never written again.

    Raises:
        SourceError: see `bert_fast.data.text_sources.read_blocks`; a line of more than 2 GiB.
    """
    first_byte, first_line, checksum = position or (0, 0, 0)
    with _open(source) as file:
        if source.is_stream:
            _skip(file, source.name, first_byte, checksum)
        else:
            file.seek(first_byte)
        rest: np.ndarray = np.empty(0, dtype=np.uint8)  # the beginning of a line whose end is not read yet
        while True:
            # A line that does not fit into a block is read on in ever larger steps: its copies cost linear time.
            buffer = np.empty(len(rest) + max(block_bytes, len(rest)), dtype=np.uint8)
            buffer[: len(rest)] = rest
            filled, stops = _fill(file, buffer, len(rest))
            ends_source = filled < len(buffer)
            start = 0 if first_byte else _check_start(source.name, buffer[: min(filled, _SNIFFED_BYTES)].tobytes())
            if ends_source and filled > (stops[-1] if len(stops) else start):
                stops = np.append(stops, filled)  # a last line without an end
            if len(stops) == 0 and not ends_source:
                if filled > MAX_LINE_BYTES:
                    raise SourceError(
                        f"{source.name}: the line from byte {first_byte} on has more than {MAX_LINE_BYTES} bytes"
                    )
                rest = buffer
                continue
            stop = int(stops[-1]) if len(stops) else start
            checksum = zlib.crc32(buffer[:stop].data, checksum) if source.is_stream else 0
            behind = [first_byte + stop, first_line + len(stops), checksum]
            boundaries = np.concatenate([[start], stops]) - start
            yield _Lines(buffer[start:stop], boundaries, first_byte + start, first_line, behind, ends_source)
            if ends_source:
                return
            first_byte, first_line = behind[:2]
            rest = buffer[stop:]


def check_stream(source: TextSource, num_bytes: int, checksum: int) -> None:
    """Reads a stream to its end and sees that it is `num_bytes` long with this CRC-32; raises SourceError if not."""
    with _open(source) as file:
        _skip(file, source.name, num_bytes, checksum)
        if file.read(1):
            raise SourceError(f"{source.name}: expected a stream of {num_bytes} bytes, as it was before, got more")


def find_invalid_utf8(data: np.ndarray) -> int | None:
    """The place of the first byte (uint8 [n]) that is not UTF-8, None if there is none."""
    try:
        codecs.utf_8_decode(data.data, "strict", True)
    except UnicodeDecodeError as error:
        return error.start
    return None


def _parse_alone(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
        raise SourceError(f"{where}: expected one JSON object, got {shown!r} ({error})") from None


def _complaint(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        return f"expected a JSON object, got {type(record).__name__}"
    if field not in record:
        return f"expected a field {field!r}, got {', '.join(map(repr, record)) or 'an empty object'}"
    return f"expected a string in the field {field!r}, got {type(record[field]).__name__}"


def _open(source: TextSource) -> Any:
    is_stdin = source.name == "-"
    return open(0 if is_stdin else source.name, "rb", buffering=0, closefd=not is_stdin)


def _fill(file: Any, buffer: np.ndarray, filled: int) -> tuple[int, np.ndarray]:
    """Reads behind `filled` bytes until the buffer is full or the file ends.

    Returns:
        The number of bytes that are in the buffer now; the places behind the line ends among those read (int64).
    """
    found: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    while filled < len(buffer):
        count = file.readinto(buffer[filled : filled + _PIECE_BYTES])
        if not count:
            break
        found.append(np.flatnonzero(buffer[filled : filled + count] == _LF) + (filled + 1))
        filled += count
    return filled, np.concatenate(found)


def _check_start(name: str, first_bytes: bytes) -> int:
    """Refuses what is not UTF-8 text by its first bytes; returns the length of the byte order mark, if any."""
    for magic, what, advice in _FOREIGN:
        if first_bytes.startswith(magic):
            raise SourceError(f"{name}: is {what}, expected UTF-8 text; {advice}")
    if first_bytes.count(0) > len(first_bytes) // 4:
        raise SourceError(
            f"{name}: expected UTF-8 text, got many zero bytes: UTF-16 without a byte order mark, or no text at all"
        )
    return len(_UTF8_BOM) if first_bytes.startswith(_UTF8_BOM) else 0


def _skip(file: Any, name: str, num_bytes: int, checksum: int) -> None:
    """Reads what was read from this stream before, and sees that it is the same."""
    found, done = 0, 0
    buffer = np.empty(min(num_bytes, 1 << 20), dtype=np.uint8)
    while done < num_bytes:
        count = file.readinto(buffer[: num_bytes - done])
        if not count:
            break
        found = zlib.crc32(buffer[:count].data, found)
        done += count
    if (done, found) != (num_bytes, checksum):
        raise SourceError(
            f"{name}: a stream that is read on must begin with the {num_bytes} bytes that were read before; "
            f"got {'other bytes' if done == num_bytes else f'only {done} bytes'}"
        )
