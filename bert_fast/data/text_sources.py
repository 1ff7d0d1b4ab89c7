"""Where a token store's texts come from: files, streams and data sets of any size, read block by block."""

import os
import reprlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bert_fast.data import text_sources_dataset, text_sources_json, text_sources_lines, text_sources_parquet
from bert_fast.data.text_blocks import Block, ReadOptions, Source, check_field
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
_READERS = {
    "text": text_sources_lines.read_blocks,
    "lines": text_sources_lines.read_blocks,
    "jsonl": text_sources_json.read_blocks,
    "parquet": text_sources_parquet.read_blocks,
    "dataset": text_sources_dataset.read_blocks,
}


def find_sources(names: Any, format: str = "auto", field: str = "text") -> list[Source]:
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
        text_sources_dataset.find(name, field)
        if text_sources_dataset.is_dataset(name)
        else _find(path_name("files", name), format)
        for name in names
    ]
    if sum(source.name == "-" for source in sources) > 1:
        raise SourceError("-: stdin can be read only once")
    for source in sources:
        if source.format == "parquet":
            text_sources_parquet.check(source, field)
    return sources


def _find(name: str, format: str) -> Source:
    if format == "auto":
        format = _SUFFIXES.get(os.path.splitext(name)[1].lower(), "text")
    status = None if name == "-" else os.stat(name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise SourceError(f"{name}: is a directory; pass the files in it")
    if status is not None and stat.S_ISREG(status.st_mode):
        with open(name, "rb"):  # raises now if it may not be read
            return Source(name, format, status.st_size, status.st_mtime_ns)
    if format == "parquet":
        raise SourceError(f"{name}: Parquet cannot be read from a stream")
    return Source(name, format)


def read_blocks(source: Source, options: ReadOptions, position: Sequence[int] = ()) -> Iterator[Block]:
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
