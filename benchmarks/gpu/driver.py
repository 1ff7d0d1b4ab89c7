"""Processes in parts, each part within its budget: what overruns is killed with all that it started, what follows runs.

A process that notes its progress and crashes is started again, and goes on behind the case that it crashed in.

Importing this module imports no torch.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.run import process_environment
from benchmarks.kit.crashes import Progress, has_crashed
from benchmarks.kit.record import ROOT, Recorder

RESTARTS = 3  # of a process that crashes; a fourth crash ends it
RESTART_S = 5.0  # with less time left than this, there is no point in another
GRACE_S = 3.0  # between asking a process to end and ending it
# A process group, where Python can: what ends this process together with its terminal ends those of the group, too.
OWN_GROUP: Any = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


@dataclass(frozen=True)
class Process:
    """One command of a part; "{until}" in it becomes when it should have ended by itself, in seconds of
    `time.monotonic`, which is one clock for all processes: what a process needs to start counts, too.

    progress: where it notes the cases that it begins (`kit/crashes.py`), if it can go on behind one; None if it cannot.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    progress: Path | None = None


@dataclass(frozen=True)
class Part:
    """Processes that run at once, and the seconds they have."""

    name: str
    budget_s: float
    processes: tuple[Process, ...]


def run_parts(parts: Sequence[Part], recorder: Recorder, log: IO[str]) -> list[dict]:
    """Runs the parts in order, each at most to the end of all budgets so far; returns the lines of kind "part".

    Whatever ends this process by a signal that can be caught ends the running part first.
    """
    start, lines, deadline = time.monotonic(), [], time.monotonic()
    for part in parts:
        deadline += part.budget_s
        lines += _run_part(part, start, deadline, recorder, log)
    return lines


def _run_part(part: Part, start: float, deadline: float, recorder: Recorder, log: IO[str]) -> list[dict]:
    begin = time.monotonic()
    seconds = max(1.0, deadline - begin)
    say(f"[{begin - start:5.0f} s] == {part.name}: at most {seconds:.0f} s", log)
    running: list[_Running] = []
    lines = []

    def record(r: _Running, outcome: str) -> None:
        fields = {"part": part.name, "process": r.name, "outcome": outcome, "status": r.status}
        # What it was at, where it did not end by itself.
        case = Progress(r.process.progress).current() if outcome in {"crashed", "killed"} else None
        fields |= {} if case is None else {"case": case}
        lines.append(recorder.write("part", **fields, seconds=r.seconds, allowed_s=round(seconds, 1)))
        if outcome != "ok":
            where = "" if case is None else f" in {case}"
            say(f"[{time.monotonic() - start:5.0f} s] {r.name}: {outcome} after {r.seconds} s{where}", log)

    try:
        running += (_Running(process, seconds, log) for process in part.processes)
        while any(r.status is None for r in running) and time.monotonic() < begin + seconds:
            time.sleep(0.02)
            left = begin + seconds - time.monotonic()
            for index, r in enumerate(running):
                if r.can_go_on and left > RESTART_S:
                    _end([r])  # what it started and left behind
                    record(r, "crashed")
                    running[index] = _Running(r.process, left, log, r.restarts + 1)
        killed = [r for r in running if r.status is None]
        _end(killed)
        for r in running:
            crashed = "crashed" if has_crashed(r.status) else "failed"
            record(r, "killed" if r in killed else "ok" if r.status == 0 else crashed)
    finally:
        _end(running)
    return lines


class _Running:
    """A process that has been started, in a group of its own so that it can be ended with everything it starts."""

    def __init__(self, process: Process, seconds: float, log: IO[str], restarts: int = 0) -> None:
        self.process, self.name, self.restarts = process, process.name, restarts
        self._start = time.monotonic()
        self._took: float | None = None
        until = f"{self._start + max(1.0, seconds - GRACE_S):.2f}"
        self.popen = subprocess.Popen(
            [word.replace("{until}", until) for word in process.command], cwd=ROOT,
            env=process_environment() | process.environment | {"PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **OWN_GROUP,
        )  # fmt: skip
        self.echo = threading.Thread(target=self._echo, args=(log,), daemon=True)
        self.echo.start()

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        status = self.popen.poll()
        if status is not None and self._took is None:
            self._took = time.monotonic() - self._start
        return status

    @property
    def can_go_on(self) -> bool:
        """Whether it crashed, and another may go on behind what it was at."""
        return has_crashed(self.status) and self.process.progress is not None and self.restarts < RESTARTS

    @property
    def seconds(self) -> float:
        """What it took, so far or in all."""
        return round(time.monotonic() - self._start if self._took is None else self._took, 1)

    def _echo(self, log: IO[str]) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            say(f"  {self.name}: {line.decode(errors='replace').rstrip()}", log)


def _end(running: Sequence[_Running]) -> None:
    """Ends processes and all that they started and left behind: asks first, then kills."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for r in running:
            try:
                os.killpg(r.popen.pid, sign)
            except (ProcessLookupError, PermissionError):  # nothing is left of it
                continue
        limit = time.monotonic() + GRACE_S
        while any(r.status is None for r in running) and time.monotonic() < limit:
            time.sleep(0.02)
    for r in running:
        r.echo.join(GRACE_S)


def say(text: str, log: IO[str]) -> None:
    print(text, flush=True)
    log.write(text + "\n")
    log.flush()
