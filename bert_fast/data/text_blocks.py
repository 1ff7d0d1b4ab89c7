"""What readers of texts have in common: sources, options, blocks, and the search for bytes that are not UTF-8."""

import codecs
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bert_fast.checks import check_integer

__all__ = ["Block", "ReadOptions", "Source", "Texts", "check_field", "find_invalid_utf8"]

# Texts of one call: strings, or bytes (uint8) with boundaries (int64 [n + 1]): text i is bytes[b[i]:b[i + 1]].
Texts = Sequence[str] | tuple[np.ndarray, np.ndarray]

MIN_BLOCK_BYTES = 16  # enough to tell by the first block what a file is
MAX_BLOCK_BYTES = 1 << 31
_CHUNK_BYTES = 1024  # of the first look at a block; small, so that one accent does not slow down much text


@dataclass(frozen=True)
class Source:
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


def find_invalid_utf8(data: np.ndarray) -> int | None:
    """The place of the first byte (uint8 [n]) that is not UTF-8, None if there is none.

    Only chunks with bytes above 127 are decoded. No character reaches from one of them into one without, so that a
    run of such chunks is valid or not by itself.
    """
    num_chunks = len(data) // _CHUNK_BYTES
    whole = data[: num_chunks * _CHUNK_BYTES].reshape(num_chunks, _CHUNK_BYTES)
    suspect = np.zeros(num_chunks + 3, dtype=np.int8)  # one of padding in front, the rest of the data, one behind
    suspect[1:-2] = whole.max(axis=1) > 127
    suspect[-2] = 1
    edges = np.flatnonzero(np.diff(suspect)) * _CHUNK_BYTES  # start, stop, start, stop, ...
    for start, stop in edges.reshape(-1, 2).tolist():
        try:
            codecs.utf_8_decode(data[start:stop].data, "strict", True)
        except UnicodeDecodeError as error:
            return start + error.start
    return None
