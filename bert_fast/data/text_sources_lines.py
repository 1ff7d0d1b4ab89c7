"""Blocks of whole lines of files and streams.

A position is [bytes, lines, CRC-32 of these bytes]. The checksum is taken of streams only, which have to be read again
from the start when a run goes on; it is 0 for files.

Files are read into buffers rather than mapped into memory: it costs the same (the search for line ends is what takes
time), a file that another process shortens is an error message and no bus error, and pipes take the same path.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_fast.data.text_blocks import Block, ReadOptions, Source, find_invalid_utf8
from bert_fast.errors import SourceError

__all__ = ["Lines", "check_stream", "check_utf8", "read_blocks", "read_lines"]

MAX_LINE_BYTES = 1 << 31  # a line has to fit into memory several times
_LF = 10
_PIECE_BYTES = 1 << 20  # read at a time and searched for line ends while it is in the processor's cache
_UTF8_BOM = b"\xef\xbb\xbf"
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
_SNIFFED_BYTES = 4096


@dataclass(frozen=True)
class Lines:
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


def read_blocks(source: Source, options: ReadOptions, position: Sequence[int] = ()) -> Iterator[Block]:
    """Every line is a text, together with its line end, which is whitespace to the tokenizer (as is CR before LF)."""
    for lines in read_lines(source, options.block_bytes, position):
        if options.errors == "strict":
            check_utf8(source.name, lines)
        texts = lines.data, lines.boundaries
        yield Block(texts, lines.position, len(lines.data), lines.position[0], lines.ends_source)


def check_utf8(name: str, lines: Lines) -> None:
    """Raises SourceError, with the place, if the lines are not UTF-8."""
    place = find_invalid_utf8(lines.data)
    if place is not None:
        line = lines.first_line + int(np.searchsorted(lines.boundaries, place, side="right"))
        raise SourceError(
            f"{name}: not UTF-8: byte {lines.first_byte + place} (line {line}) is 0x{lines.data[place]:02x}; "
            "errors='replace' reads on"
        )


def read_lines(source: Source, block_bytes: int, position: Sequence[int] = ()) -> Iterator[Lines]:
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
        rest = np.empty(0, dtype=np.uint8)  # the beginning of a line whose end is not read yet
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
            yield Lines(buffer[start:stop], boundaries, first_byte + start, first_line, behind, ends_source)
            if ends_source:
                return
            first_byte, first_line = behind[:2]
            rest = buffer[stop:]


def check_stream(source: Source, num_bytes: int, checksum: int) -> None:
    """Reads a stream to its end and sees that it is `num_bytes` long with this CRC-32; raises SourceError if not."""
    with _open(source) as file:
        _skip(file, source.name, num_bytes, checksum)
        if file.read(1):
            raise SourceError(f"{source.name}: expected a stream of {num_bytes} bytes, as it was before, got more")


def _open(source: Source) -> Any:
    is_stdin = source.name == "-"
    return open(0 if is_stdin else source.name, "rb", buffering=0, closefd=not is_stdin)


def _fill(file: Any, buffer: np.ndarray, filled: int) -> tuple[int, np.ndarray]:
    """Reads behind `filled` bytes until the buffer is full or the file ends.

    Returns:
        The number of bytes that are in the buffer now; the places behind the line ends among those read (int64).
    """
    found = [np.empty(0, dtype=np.int64)]
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
