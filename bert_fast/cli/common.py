"""What several commands have in common: checked numbers, devices by name, which process talks, how far it is."""

import argparse
import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from bert_fast.numerals import parsed_integer, parsed_number
from bert_fast.terminal import Part, StatusLine

if TYPE_CHECKING:
    import torch

__all__ = [
    "Show",
    "find_device",
    "is_main_process",
    "loaded",
    "natural",
    "positive",
    "progress",
    "seconds",
]

_Loaded = TypeVar("_Loaded")
# Called with bytes read, bytes in all (None if unknown) and what is said beside them.
Show = Callable[[int, int | None, str], None]


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number from 0 on."""
    return _whole(text, 0)


def seconds(text: str) -> float:
    """A time from 0 on."""
    try:
        value = parsed_number(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds from 0 on, got {text}")
    return value


def find_device(name: str) -> "torch.device":
    """A device that can be used: "auto" is cuda if there is one, else cpu.

    Raises:
        ValueError: there is no such device here.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device: {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def loaded(load: Callable[[], _Loaded]) -> _Loaded:
    """What `load` makes of files.

    Raises:
        ValueError: also where it raises TypeError, which is what it says of a wrong kind of value in a file, too.
    """
    try:
        return load()
    except TypeError as error:
        raise ValueError(str(error)) from error


def is_main_process() -> bool:
    """Whether this process talks: the only one, or the first of those that `torchrun` or `accelerate launch` made."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def progress(command: str, is_quiet: bool) -> Iterator[Show | None]:
    """What shows on stderr how far `command` is that reads files; None if it is to be quiet."""
    if is_quiet:
        yield None
        return
    line, began = StatusLine(is_transient=True), time.monotonic()

    def show(done: int, total: int | None, text: str) -> None:
        share = done / total if total else None
        parts = [Part(text, 0)]
        if share:
            seconds = round((time.monotonic() - began) * (1 / share - 1))
            parts = [Part(f"{share:.0%}", 1), *parts, Part(f"{datetime.timedelta(seconds=seconds)} left", 2)]
        line.show(parts, share, f"bert-fast {command}: {f'{share:.0%}, ' if share is not None else ''}{text}")

    with contextlib.closing(line):
        line.open(is_patient=True)
        yield show


def _whole(text: str, least: int) -> int:
    try:
        value = parsed_integer(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text}")
    return value
