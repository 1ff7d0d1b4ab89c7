"""`StopSignals`: SIGTERM and Ctrl-C become a request that the loop reads between steps."""

import os
import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["StopSignals"]


class StopSignals:
    """While it is entered, the first SIGTERM or SIGINT is only noted: `received` is then its name.

    A second one does what it did before: SIGINT raises KeyboardInterrupt. Outside the main thread, where Python allows
    no handlers, nothing is noted.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in self._SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, self._before[signal.Signals(number)])
            os.kill(os.getpid(), number)
        else:
            self.received = signal.Signals(number).name
