"""A whole text file in memory, for formats of fine-tuning data."""

import os

from bert_fast.data.text_blocks import Source
from bert_fast.data.text_sources_lines import read_lines
from bert_fast.errors import SourceError
from bert_fast.files import path_name

__all__ = ["read_text_file"]

_BLOCK_BYTES = 4 << 20


def read_text_file(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, its line ends as they stand, a byte order mark left out.

    Raises:
        OSError: there is no such file, or it may not be read.
        SourceError: the file is empty, not UTF-8 (the message names byte and line), or of another kind: UTF-16, gzip,
            Parquet, ...
    """
    name = path_name("path", path)
    status = os.stat(name)
    blocks = [lines.data for lines in read_lines(Source(name, "lines", status.st_size, 0), _BLOCK_BYTES)]
    data = b"".join(block.data for block in blocks)
    if not data:
        raise SourceError(f"{name}: is empty")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        before = status.st_size - len(data)  # the byte order mark, which is not among the lines
        raise SourceError(
            f"{name}: line {line}: expected UTF-8, got byte 0x{data[error.start]:02x} (byte {before + error.start} of "
            "the file)"
        ) from None
