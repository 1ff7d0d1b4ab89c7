"""Columns of strings as Arrow keeps them: what Parquet files and data sets hand to the tokenizer without a copy."""

from typing import Any

import numpy as np

from bert_fast.data.text_blocks import find_invalid_utf8
from bert_fast.errors import SourceError

__all__ = ["bytes_of", "check_utf8", "is_text"]


def is_text(found: Any) -> bool:
    """Whether an Arrow type is one of strings or bytes."""
    from pyarrow import types

    checks = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(check(found) for check in checks)


def bytes_of(texts: Any) -> tuple[np.ndarray, np.ndarray]:
    """The bytes (uint8) and boundaries (int64 [n + 1]) of an Arrow array of strings."""
    import pyarrow

    if pyarrow.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    texts = texts.cast(pyarrow.large_binary())  # without a look at the bytes: UTF-8 or not is for `errors` to say
    if texts.null_count:
        texts = texts.fill_null(b"")
    _, offsets, content = texts.buffers()
    boundaries = np.frombuffer(offsets, dtype=np.int64, count=texts.offset + len(texts) + 1)[texts.offset :]
    data = np.frombuffer(content, dtype=np.uint8) if content is not None else np.empty(0, dtype=np.uint8)
    return data[boundaries[0] : boundaries[-1]], boundaries - boundaries[0]


def check_utf8(name: str, data: np.ndarray, boundaries: np.ndarray, first_row: int) -> None:
    """Raises SourceError, with the row, if a text is not UTF-8."""
    place = find_invalid_utf8(data)
    if place is not None:
        row = int(np.searchsorted(boundaries, place, side="right")) - 1
        raise SourceError(
            f"{name}: not UTF-8: byte {place - boundaries[row]} of row {first_row + row} is 0x{data[place]:02x}; "
            "errors='replace' reads on"
        )
