"""Real text without a download: the Python language reference, which CPython carries for its `help()`.

Topics are reStructuredText rendered as plain text: headings underlined with punctuation, paragraphs between blank
lines, examples and the descriptions under a definition indented by three spaces.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bert_fast.demo.requirements import DemoError

__all__ = ["Passage", "python_reference", "split_passages"]

MIN_CHARS = 60  # a shorter paragraph ("For example:") belongs to what follows
MAX_CHARS = 1200  # about 256 tokens, what the model was trained to embed
_UNDERLINE = re.compile(r"([*=\-~^\"'#+])\1{2,}")


@dataclass(frozen=True)
class Passage:
    """A paragraph with the examples that belong to it, under the heading it stands under."""

    heading: str
    text: str


def python_reference() -> list[Passage]:
    """Every passage of the reference once, in the order of its topics.

    Raises:
        DemoError: this Python comes without the text.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DemoError(
            "this Python has no module pydoc_data, the text that the demo reads; Debian's package libpython3-stdlib "
            "and python.org's installers contain it"
        ) from None
    return split_passages(topics)


def split_passages(topics: Mapping[str, str]) -> list[Passage]:
    """Passages of all topics; text that several topics share is kept once."""
    passages: dict[str, Passage] = {}
    for name in sorted(topics):
        for passage in _passages_of(name, topics[name]):
            passages.setdefault(passage.text, passage)
    return list(passages.values())


def _passages_of(name: str, topic: str) -> Iterator[Passage]:
    heading, gathered = name, ""
    for block in _blocks(topic):
        lines = block.splitlines()
        title = len(lines) >= 2 and _UNDERLINE.fullmatch(lines[1].strip()) is not None
        starts_anew = title or not block.startswith(" ") or len(gathered) + len(block) > MAX_CHARS
        if gathered and starts_anew and (title or len(gathered) >= MIN_CHARS):
            yield from _cut(heading, gathered)
            gathered = ""
        if title:
            heading = lines[0].strip()
            block = "\n".join(lines[2:])
        gathered = f"{gathered}\n\n{block}" if gathered else block
    yield from _cut(heading, gathered)


def _blocks(topic: str) -> Iterator[str]:
    """What stands between blank lines, indentation kept."""
    for block in re.split(r"\n\s*\n", topic):
        if block.strip():
            yield block.strip("\n").rstrip()


def _cut(heading: str, text: str) -> Iterator[Passage]:
    """The text as a passage, or as several where one paragraph alone is too long; nothing if too short to say much."""
    text = textwrap.dedent(text).strip()
    while len(text) > MAX_CHARS:
        # at the end of a line: the table of operators, say, has no better place
        end = text.rfind("\n", MIN_CHARS, MAX_CHARS)
        end = MAX_CHARS if end < 0 else end
        yield Passage(heading, text[:end].strip())
        text = text[end:].strip()
    if len(text) >= MIN_CHARS:
        yield Passage(heading, text)
