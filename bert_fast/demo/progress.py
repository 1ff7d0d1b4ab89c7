"""How steps tell how far they are, whoever listens."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

__all__ = ["Advance", "Track", "silent"]

Advance = Callable[[], None]  # one unit of work is done
Track = Callable[[str, int], AbstractContextManager[Advance]]  # (what is done, units in all) -> context


@contextlib.contextmanager
def silent(description: str, total: int) -> Iterator[Advance]:
    """A `Track` that nobody watches."""
    yield lambda: None
