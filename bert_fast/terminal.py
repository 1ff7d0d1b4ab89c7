"""The terminal: texts that it does not obey, and one line that says how far something is."""

import importlib.util
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

# What data may not do to a terminal. Control characters but for tabs and line ends; marks that turn the direction of a
# line; line ends that are none to the next program; halves of characters, which cannot be encoded, such as bytes of
# file names that are not UTF-8.
_ACTIVE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

LINE_SECONDS = 10.0  # between lines where nothing can be drawn over
_BAR = 20  # columns
_BETWEEN = "  "


def printable(text: str) -> str:
    r"""The text with what a terminal would act on as \u001b and the like: as JSON has it, too."""
    return _ACTIVE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@dataclass(frozen=True)
class Part:
    """A piece of the line; of those that do not fit, the one of the greatest rank goes first."""

    text: str
    rank: int


class StatusLine:
    """How far something is: one line that is drawn over, with rich; elsewhere, or without rich, a line now and then.

    Args:
        stream: default stderr.
        clock: seconds, from any beginning.
        is_transient: whether a line that is drawn over is wiped away by `close`.
    """

    def __init__(
        self, stream: IO[str] | None = None, clock: Callable[[], float] = time.monotonic, is_transient: bool = False
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock, self._is_transient = clock, is_transient
        self._live: Live | None = None
        self._last_line = float("-inf")

    def open(self, text: str = "", is_patient: bool = False) -> None:
        """Draws from now on, if the terminal can be drawn over. is_patient: elsewhere the first line comes late."""
        self._last_line = self._clock() if is_patient else float("-inf")
        if self._can_draw():
            from rich.console import Console
            from rich.live import Live

            # Without a thread of its own: drawn when something is known. What others print appears above the line.
            console = Console(file=self._stream)
            self._live = Live(console=console, auto_refresh=False, transient=self._is_transient)
            self._live.start()
            self._live.update(text, refresh=True)

    def show(self, parts: Sequence[Part], share: float | None, plain: str = "") -> None:
        """Draws the line anew.

        Args:
            parts: from left to right.
            share: of all that there is to do, for the bar; None: it is not known.
            plain: what stands in a line that stays; default: the parts.
        """
        if self._live is not None:
            self._live.update(_drawn(parts, share, self._live.console.width), refresh=True)
        elif self._clock() - self._last_line >= LINE_SECONDS:
            self._last_line = self._clock()
            self._write(plain or _BETWEEN.join(part.text for part in parts))

    def close(self) -> None:
        """Draws no more."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _can_draw(self) -> bool:
        if not self._stream.isatty() or not _is_installed("rich"):
            return False
        from rich.console import Console

        return not Console(file=self._stream).is_dumb_terminal

    def _write(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)


def _drawn(parts: Sequence[Part], share: float | None, width: int) -> "Text":
    """What rich draws: as many pieces as fit, and a bar where there is room left."""
    from rich.text import Text

    kept = list(parts)
    while len(kept) > 1 and len(_BETWEEN.join(part.text for part in kept)) >= width:
        kept.remove(max(kept, key=lambda part: part.rank))
    line = Text(no_wrap=True, overflow="crop")
    if share is not None and len(_BETWEEN.join(part.text for part in kept)) + _BAR + len(_BETWEEN) < width:
        full = round(_BAR * share)
        line.append("━" * full, "green")
        line.append("─" * (_BAR - full), "bright_black")
        line.append(_BETWEEN)
    return line.append(_BETWEEN.join(part.text for part in kept))


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
