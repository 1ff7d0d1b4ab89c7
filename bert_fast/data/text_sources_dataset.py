"""A column of a Hugging Face `datasets.Dataset`, read where Arrow keeps it. A position is [row]."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bert_fast.data.text_blocks import Block, ReadOptions, Source
from bert_fast.data.text_sources_arrow import bytes_of, check_utf8, is_text
from bert_fast.errors import SourceError

__all__ = ["find", "is_dataset", "read_blocks"]


def is_dataset(found: Any) -> bool:
    """Whether it is a `datasets.Dataset`: nobody has one who has not imported the package."""
    return type(found).__module__.split(".")[0] == "datasets" and hasattr(found, "with_format")


def find(dataset: Any, field: str) -> Source:
    """The data set as a source; it is known again by its fingerprint, which follows its content and its rows.

    Raises:
        SourceError: it is read from a stream, or has no such column of strings.
    """
    fingerprint = getattr(dataset, "_fingerprint", None)
    if fingerprint is None:
        raise SourceError(f"{type(dataset).__name__}: expected a datasets.Dataset (streaming=False, one split)")
    name = f"dataset {fingerprint}"
    if field not in dataset.column_names:
        columns = ", ".join(map(repr, dataset.column_names))
        raise SourceError(f"{name}: expected one column {field!r}, got {columns}")
    found = dataset.features.arrow_schema.field(field).type
    if not is_text(found):
        raise SourceError(f"{name}: expected strings in the column {field!r}, got {found}")
    return Source(name, "dataset", dataset.data.nbytes, dataset=dataset)


def read_blocks(source: Source, options: ReadOptions, position: Sequence[int] = ()) -> Iterator[Block]:
    """Every row is a text; null is an empty one.

    Raises:
        SourceError: see `bert_fast.data.text_sources.read_blocks`.
    """
    texts = source.dataset.with_format("arrow", columns=[options.field])
    num_rows, size = len(texts), source.size or 0
    step = max(1, options.block_bytes * num_rows // max(size, 1))
    for first in range(position[0] if position else 0, num_rows, step):
        rows = texts[first : min(first + step, num_rows)]
        data, boundaries = bytes_of(rows.column(options.field).combine_chunks())
        if options.errors == "strict":
            check_utf8(source.name, data, boundaries, first)
        end = first + len(rows)
        yield Block((data, boundaries), [end], len(data), size * end // num_rows, False)
    nothing = (np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64))
    yield Block(nothing, [num_rows], 0, size, True)
