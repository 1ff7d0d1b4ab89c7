"""What a process that may crash leaves for the one that goes on behind it.

After an illegal access a process' CUDA context is dead: whatever it runs next fails too. Such a process ends, with
status UNUSABLE, and another runs the cases behind the one that did it.

Importing this module imports no torch.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

UNUSABLE = 93  # exit status of a process whose device no longer answers


class Progress:
    """The cases that the processes of one command have begun and ended, in a file. path: None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def plan(self, names: list[str]) -> None:
        """All cases that a process knows of, before the first of them."""
        self._note("plan", names)

    def begin(self, name: str) -> None:
        """Before a case."""
        self._note("begin", name)

    def end(self, name: str) -> None:
        """After it, if the process can go on."""
        self._note("end", name)

    @property
    def size(self) -> int:
        """Bytes that were noted: more of them is a sign of life."""
        return 0 if self._path is None or not self._path.exists() else self._path.stat().st_size

    def planned(self) -> list[str] | None:
        """What was planned; None where no process has come that far."""
        return next((names for what, names in self._notes() if what == "plan"), None)

    def begun(self) -> list[str]:
        """All that were begun, in order, by whichever process."""
        return [name for what, name in self._notes() if what == "begin"]

    def current(self) -> str | None:
        """The one that was begun last, if it has not ended: what a process that is gone was at."""
        notes = self._notes()
        last = next((name for what, name in reversed(notes) if what == "begin"), None)
        return None if last is None or ["end", last] in notes else last

    def _note(self, what: str, name: str | list[str]) -> None:
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps([what, name])}")  # a line that was not finished ends here

    def _notes(self) -> list[list[Any]]:
        if self._path is None or not self._path.exists():
            return []
        notes = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # of a process that was killed while it wrote
                notes.append(json.loads(line))
        return notes


def has_crashed(status: int | None) -> bool:
    """Whether a process ended by a signal, or since its device had gone."""
    return status is not None and (status < 0 or status == UNUSABLE)


def is_usable(device: Any) -> bool:
    """Whether the device still answers; waits for what was launched."""
    import torch

    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def leave() -> NoReturn:
    """Ends this process at once: what ends one in order would wait for the device."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(UNUSABLE)
