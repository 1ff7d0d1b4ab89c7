"""The processes of `make gpu-smoke`: a family each, side by side, started again after a crash or a hang.

The case that crashed or hung is run again alone, with CUDA_LAUNCH_BLOCKING=1, so that its error names the launch; the
cases behind it go on in another process. At the deadline everything is killed, and what is left was not run.

Importing this module imports no torch.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.driver import OWN_GROUP
from benchmarks.gpu.run import CLEARED_VARIABLES
from benchmarks.kit.record import ROOT

SAID = 1500  # characters of what a process said before it ended


@dataclass
class Job:
    """Cases of a family for one process.

    cases: those that are left, None until the process has named all. share: "1/3" for every third case, from the second
    on, where a family has several processes.
    """

    family: str
    cases: list[str] | None = None
    blocking: bool = False
    share: str = "0/1"

    @property
    def name(self) -> str:
        """Of all cases together."""
        return self.family if self.share == "0/1" else f"{self.family} {self.share}"


class Supervisor:
    """Runs jobs until all cases are through or the deadline has come.

    worker: the command of a process, without --family and --only. tell: called with the fields of every case that is
    through: family, case, outcome, ..., and blocking, whether it was run a second time. deadline: of `time.monotonic`.
    case_s, start_s: how long a case, and what comes before the first, may take. at_once: processes.
    """

    def __init__(
        self, worker: tuple[str, ...], tell: Callable[..., None], deadline: float, case_s: float, start_s: float,
        at_once: int,
    ) -> None:  # fmt: skip
        self._worker, self._tell, self._deadline = worker, tell, deadline
        self._case_s, self._start_s, self._at_once = case_s, start_s, at_once
        self._events: queue.Queue[tuple[_Process, dict[str, Any] | None]] = queue.Queue()
        self._waiting: deque[Job] = deque()
        self._running: list[_Process] = []

    def run(self, jobs: Iterable[Job]) -> list[Job]:
        """Returns jobs with the cases that were not run."""
        self._waiting += jobs
        try:
            while (self._waiting or self._running) and time.monotonic() < self._deadline:
                while self._waiting and len(self._running) < self._at_once:
                    self._running.append(_Process(self._waiting.popleft(), self._worker, self._events))
                try:
                    process, message = self._events.get(timeout=0.05)
                except queue.Empty:  # only then is all known that they said
                    self._end_what_hangs()
                    continue
                if process in self._running:  # not one that hung
                    self._take(process, message)
            return [*(process.job for process in self._running), *self._waiting]
        finally:
            for process in self._running:
                process.kill()

    def _take(self, process: "_Process", message: dict[str, Any] | None) -> None:
        """One line of a process, or None: it has ended."""
        process.since = time.monotonic()
        if message is None:
            status = process.kill()
            self._ended(process, "crash", f"the process ended with status {status}")
        elif "cases" in message:
            process.job.cases = message["cases"]
        elif "begin" in message:
            process.current = message["begin"]
        else:
            self._through(process, message)

    def _through(self, process: "_Process", message: dict[str, Any]) -> None:
        job, process.current, process.has_told = process.job, None, True
        if job.cases and message["case"] in job.cases:
            job.cases.remove(message["case"])
        self._tell(**{"family": job.family, "blocking": job.blocking, **message})
        if message["outcome"] in {"crash", "hang"} and not job.blocking:
            self._waiting.appendleft(Job(job.family, [message["case"]], blocking=True))

    def _ended(self, process: "_Process", outcome: str, why: str) -> None:
        """Tells of the case that a process did not come back from, and starts another for those behind it."""
        self._running.remove(process)
        job = process.job
        if job.cases is None:  # it cannot be started: nor could another
            error = process.explain(why)
            self._tell(
                family=job.family, blocking=False, case=job.name, share=job.share, outcome=outcome, error=error
            )  # fmt: skip
            return
        if job.cases and (process.current or not process.has_told):
            case = process.current or job.cases[0]
            self._through(process, {"case": case, "outcome": outcome, "error": process.explain(why)})
        if job.cases:
            self._waiting.appendleft(Job(job.family, job.cases))

    def _end_what_hangs(self) -> None:
        now = time.monotonic()
        for process in list(self._running):
            limit = self._case_s if process.current else self._start_s
            if now - process.since > limit:
                process.kill()
                self._ended(process, "hang", f"nothing came for {limit:.0f} s")


def _chosen(job: Job) -> tuple[str, str]:
    return ("--share", job.share) if job.cases is None else ("--only", json.dumps(job.cases))


class _Process:
    """A running job. current: the case that it has begun; since: when it last said something."""

    def __init__(self, job: Job, worker: tuple[str, ...], events: "queue.Queue[Any]") -> None:
        self.job, self.current, self.since, self.has_told = job, None, time.monotonic(), False
        command = [*worker, "--family", job.family, *_chosen(job)]
        environment = {name: value for name, value in os.environ.items() if name not in CLEARED_VARIABLES}
        environment.setdefault("OMP_NUM_THREADS", "2")  # of many processes at once
        environment |= {"CUDA_LAUNCH_BLOCKING": "1"} if job.blocking else {}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process is asked about
        self._popen = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._said,
            **OWN_GROUP,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(events,), daemon=True).start()

    def _read(self, events: "queue.Queue[Any]") -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # the last one, of a process that died on it
                events.put((self, json.loads(line)))
        events.put((self, None))

    def explain(self, why: str) -> str:
        """With the last words of the process."""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - SAID))
        return f"{why}: {self._said.read().decode(errors='replace').strip()}".removesuffix(": ")

    def kill(self) -> int:
        """Ends it with all that it started; its exit status."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        return self._popen.wait()
