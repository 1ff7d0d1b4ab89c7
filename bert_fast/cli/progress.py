"""How far a command is that reads files: a bar on a terminal, else a line now and then; both on stderr."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

__all__ = ["LINE_SECONDS", "Show", "progress"]

# Called with bytes read, bytes in all (None if unknown) and what is said beside them.
Show = Callable[[int, int | None, str], None]

LINE_SECONDS = 10.0  # between lines of progress where there is no bar


def progress(command: str, is_quiet: bool) -> AbstractContextManager[Show | None]:
    """What shows how far `command` is: nothing, a bar on a terminal if rich is installed, or lines."""
    if is_quiet:
        return contextlib.nullcontext()
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        return _bar()
    return contextlib.nullcontext(_printer(command))


@contextlib.contextmanager
def _bar() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, line: bar.update(task, description=line, total=total, completed=done)


def _printer(command: str) -> Show:
    shown = time.monotonic()

    def show(done: int, total: int | None, line: str) -> None:
        nonlocal shown
        if time.monotonic() - shown >= LINE_SECONDS:
            shown = time.monotonic()
            share = f"{done / total:.0%}, " if total else ""
            print(f"bert-fast {command}: {share}{line}", file=sys.stderr, flush=True)

    return show
