"""What several commands have in common: checked numbers, which process talks, and how it does."""

import argparse
import difflib
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial

from bert_fast.numerals import parsed_integer, parsed_number
from bert_fast.terminal import printable


def _whole(least: int, text: str) -> int:
    try:
        value = parsed_integer(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text}")
    return value


positive, natural = partial(_whole, 1), partial(_whole, 0)


def seconds(text: str) -> float:
    """A time from 0 on."""
    try:
        value = parsed_number(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds from 0 on, got {text}")
    return value


def need(install: str, *packages: str) -> None:
    """Raises ImportError, which says what to install, where a package that a command imports is not there."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"not installed: {', '.join(missing)}; pip install {install}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that is nearest, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def check_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Ends the program (status 2) at an unknown flag, with the nearest: before a missing one is asked for."""
    every = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    for word in itertools.takewhile(lambda word: word != "--", argv):
        name = word.partition("=")[0]
        begun = parser.allow_abbrev and any(flag.startswith(name) for flag in every)
        if name.startswith("--") and name not in every and not begun:
            parser.error(printable(f"no flag {name}{nearest(name, every)}"))


def is_main_process() -> bool:
    """Whether this process talks: the only one, or the first of those that `torchrun` or `accelerate launch` made."""
    return os.environ.get("RANK", "0") == "0"


def say(command: str, text: str) -> None:
    """Prints one line of a command on stderr."""
    print(printable(f"bert-fast {command}: {' '.join(text.split())}"), file=sys.stderr)
