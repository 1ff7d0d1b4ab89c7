"""JSON lines, parsed with the standard library: one record a line, the text is the string in one of its fields."""

import codecs
import json
from collections.abc import Iterator, Sequence
from typing import Any

from bert_fast.data.text_blocks import Block, ReadOptions, Source
from bert_fast.data.text_sources_lines import Lines, check_utf8, read_lines
from bert_fast.errors import SourceError

__all__ = ["read_blocks"]

_SHOWN_CHARS = 60  # how much of a wrong line a message shows
_MISSING = object()


def read_blocks(source: Source, options: ReadOptions, position: Sequence[int] = ()) -> Iterator[Block]:
    """Every record is a text; null is an empty one; lines of whitespace are skipped.

    Raises:
        SourceError: see `bert_fast.data.text_sources.read_blocks`; a line is not one object with a string or null in
            the field.
    """
    for lines in read_lines(source, options.block_bytes, position):
        texts = list(_texts(source.name, lines, options))
        yield Block(texts, lines.position, len(lines.data), lines.position[0], lines.ends_source)


def _texts(name: str, lines: Lines, options: ReadOptions) -> Iterator[str]:
    try:
        content = codecs.utf_8_decode(lines.data.data, options.errors, True)[0]
    except UnicodeDecodeError:
        check_utf8(name, lines)
        raise
    parse = json.JSONDecoder().raw_decode  # parses a record where it stands: no string is made for its line
    start, line = 0, lines.first_line
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
        value = record.get(options.field, _MISSING) if type(record) is dict else _MISSING
        if type(value) is str:
            yield value
        elif value is None:
            yield ""
        else:
            raise SourceError(f"{name}: line {line}: {_complaint(record, options.field)}")


def _parse_alone(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
        raise SourceError(f"{where}: expected one JSON record, got {shown!r} ({error})") from None


def _complaint(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        return f"expected a JSON object, got {type(record).__name__}"
    if field not in record:
        return f"expected a field {field!r}, got {', '.join(map(repr, record)) or 'an empty object'}"
    return f"expected a string in the field {field!r}, got {type(record[field]).__name__}"
