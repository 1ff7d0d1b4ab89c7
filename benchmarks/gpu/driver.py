"""Processes in parts, each part within its budget: what overruns is killed with all that it started, what follows runs.

A process that notes its progress (`kit/crashes.py`) and crashes, or takes too long for a case, is started again behind
that case, as long as a case is left and each start begins another one. After FRUITLESS starts in a row that got through
no case the device is taken for gone.

Importing this module imports no torch.
"""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.run import process_environment
from benchmarks.kit.crashes import Progress, has_crashed
from benchmarks.kit.results import ROOT, Recorder

GRACE_S = 3.0  # between asking a process to end and ending it
POLL_S = 0.02
LAST_WORDS = 1500  # characters of what a process wrote before it ended
GOOD = ("ok", "skipped")  # outcomes of a process
FRUITLESS = 3
# A process group, where Python can: what ends this process together with its terminal ends those of the group, too.
OWN_GROUP: Any = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    outcome: ok; failed (another exit status than 0); crashed (by a signal, or within a case); hung (it took too long
    for a case, or to begin); killed (the part's time was up); not run. case: what it was at. output: all lines that it
    wrote. goes_on: whether another process goes on behind the case.
    """

    outcome: str
    status: int | None = None
    case: str | None = None
    output: Sequence[str] = ()
    goes_on: bool = False

    @property
    def why(self) -> str:
        """A reason, with the last words of the process."""
        reason = f"the process ended with status {self.status}"
        if self.outcome == "hung":
            reason = "nothing came for too long"
        said = "\n".join(self.output)[-LAST_WORDS:].strip()
        return f"{reason}: {said}" if said else reason


@dataclass(frozen=True)
class Process:
    """One command of a part; "{until}" in it becomes when it should have ended by itself, in seconds of
    `time.monotonic`, which is one clock for all processes: what a process needs to start counts, too.

    progress: where it notes the cases that it begins, if another can go on behind one; None if none can.
    case_s, start_s: how long a case, and what comes before the first, may take.
    alone: makes the process that runs a case once more by itself, after one crashed or hung in it.
    ended: is told how it ended as soon as it has; returns the outcome for the process' line.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    progress: Path | None = None
    case_s: float = math.inf
    start_s: float = math.inf
    alone: "Callable[[str], Process] | None" = None
    ended: Callable[[Ended], str] = lambda ended: ended.outcome


@dataclass(frozen=True)
class Part:
    """Processes that run side by side, at most `at_once` of them, and the seconds they have."""

    name: str
    budget_s: float
    processes: tuple[Process, ...]
    at_once: int | None = None


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
    waiting, running = deque(part.processes), list[_Running]()
    fruitless = Counter[str]()  # starts in a row that got through no case, by process
    lines = []

    def note(process: Process, ended: Ended, took: float) -> str:
        outcome = process.ended(ended)
        fields = {"part": part.name, "process": process.name, "outcome": outcome, "status": ended.status}
        fields |= {} if ended.case is None else {"case": ended.case}
        lines.append(recorder.write("part", **fields, seconds=took, allowed_s=round(seconds, 1)))
        if outcome != "ok":
            where = "" if ended.case is None else f" in {ended.case}"
            say(f"[{time.monotonic() - start:5.0f} s] {process.name}: {outcome} after {took} s{where}", log)
        return outcome

    def close(one: _Running, outcome: str) -> None:
        """Ends what is left of a process, notes how it ended, and lines up what comes behind it."""
        running.remove(one)
        _end([one])
        process, ended = one.process, one.how_it_ended(outcome, fruitless)
        if note(process, ended, one.seconds) == ended.outcome and ended.goes_on:
            if process.alone is not None and ended.case is not None:
                waiting.appendleft(process.alone(ended.case))
            waiting.appendleft(process)

    try:
        while (waiting or running) and (left := begin + seconds - time.monotonic()) > 0:
            while waiting and len(running) < (part.at_once or math.inf):
                running.append(_Running(waiting.popleft(), left, log))
            time.sleep(POLL_S)
            for one in list(running):
                if (outcome := one.outcome()) is not None:
                    close(one, outcome)
        late = [(one, one.outcome() or "killed") for one in running]
        _end(running)
        for one, outcome in late:
            close(one, outcome)
        for process in waiting:
            note(process, Ended("not run"), 0.0)
    finally:
        _end(running)
    return lines


class _Running:
    """A process that has been started, in a group of its own so that it can be ended with everything it starts."""

    def __init__(self, process: Process, seconds: float, log: IO[str]) -> None:
        self.process, self._progress = process, Progress(process.progress)
        self._num_begun, self._size = len(self._progress.begun()), self._progress.size
        self._start = self._since = time.monotonic()
        self._took: float | None = None
        self._output: list[str] = []
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
    def seconds(self) -> float:
        """What it took, so far or in all."""
        return round(time.monotonic() - self._start if self._took is None else self._took, 1)

    def outcome(self) -> str | None:
        """None while it runs as it should."""
        if self.status is None:
            return "hung" if self._is_late() else None
        if has_crashed(self.status) or self._progress.current() is not None:
            return "crashed"
        return "ok" if self.status == 0 else "failed"

    def _is_late(self) -> bool:
        size, now = self._progress.size, time.monotonic()
        if size != self._size:
            self._size, self._since = size, now
        took, process = now - self._since, self.process
        if took <= min(process.case_s, process.start_s):
            return False
        return took > (process.start_s if self._progress.current() is None else process.case_s)

    def how_it_ended(self, outcome: str, fruitless: Counter[str]) -> Ended:
        """After its end; the case that it was at counts as ended, too. fruitless: is kept."""
        case = self._progress.current() if outcome in ("crashed", "hung", "killed") else None
        if case is not None:
            self._progress.end(case)
        begun, planned, name = self._progress.begun(), self._progress.planned(), self.process.name
        num_new = len(begun) - self._num_begun
        fruitless[name] = fruitless[name] + 1 if num_new <= 1 else 0
        is_left = planned is None or not set(planned) <= set(begun)  # pytest plans nothing
        goes_on = outcome in ("crashed", "hung") and num_new > 0 and is_left and fruitless[name] < FRUITLESS
        return Ended(outcome, self.status, case, self._output, goes_on)

    def _echo(self, log: IO[str]) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._output.append(line.decode(errors="replace").rstrip())
            say(f"  {self.process.name}: {self._output[-1]}", log)


def _end(running: Iterable[_Running]) -> None:
    """Ends processes and all that they started and left behind: asks first, then kills."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for r in running:
            try:
                os.killpg(r.popen.pid, sign)
            except (ProcessLookupError, PermissionError):  # nothing is left of it
                continue
        limit = time.monotonic() + GRACE_S
        while any(r.status is None for r in running) and time.monotonic() < limit:
            time.sleep(POLL_S)
    for r in running:
        r.echo.join(GRACE_S)


def say(text: str, log: IO[str]) -> None:
    print(text, flush=True)
    log.write(text + "\n")
    log.flush()
