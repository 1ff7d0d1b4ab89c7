"""Cases in processes that may die.

The parent imports everything once and forks a worker for each batch, so that a worker costs milliseconds. A worker
makes one case after another and notes each outcome in memory that it shares with the parent. It ends by itself or by a
signal: a crash, a case that takes more processor time than its limit (which a busy machine does not change), one that
waits for something for minutes. The parent knows at which case, and goes on with the next one in another worker. Memory
is limited too: what asks for more is a MemoryError or PyTorch's RuntimeError, and so a finding. What went wrong is
tried once more, alone in a process, and told with its script; what needs the cases before it says so.
"""

import faulthandler
import gc
import importlib
import mmap
import os
import pkgutil
import re
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import bert_fast.reference
import bert_fast.torch
from bert_fast import errors

from .case import Case, Finding, PoorRefusal, Refused
from .surfaces import surface_of

BATCH = 250  # cases a worker; a fork of the parent takes as long as a few of them
WALL_SECONDS = 300.0  # for a case that waits without computing: a deadlock
FILE_BYTES = 1 << 28
TOLD = 2  # of findings that seem to have one cause
_IMPORTED_LATE = ("torch._dynamo", "torch._refs", "torch._meta_registrations")  # by PyTorch, on first use
_OUTCOMES = ["unknown", "returned", "finding", "TypeError", "ValueError", "OSError", "RuntimeError"]
_OUTCOMES += [*errors.__all__, "FileNotFoundError", "FileExistsError", "IsADirectoryError", "NotADirectoryError"]
_OUTCOMES += ["PermissionError", "poor refusal", "another exception"]


@dataclass
class Trouble:
    """A case that failed: what happened, and the script of the case up to there."""

    number: int
    surface: str
    what: str
    script: str = ""
    alone: bool = True  # whether it fails in a process that made no other case
    alike: int = 0  # further cases of the surface that seem to have the same cause

    def __str__(self) -> str:
        lines = [f"case {self.number} ({self.surface}): {self.what}"]
        if not self.alone:
            lines.append("    not alone in a process: it needs cases of its batch before it")
        if self.alike:
            lines.append(f"    and {self.alike} cases more")
        return "\n".join([*lines, *(f"    {line}" for line in self.script.splitlines())])

    @property
    def signature(self) -> str:
        """What findings with one cause are likely to share: the kind of what happened, and where."""
        kind, place = self.what.split()[0], re.search(r"\(at \S+:\d+\)$", self.what)
        rest = place[0] if place else re.sub(r"/\S+|'[^']*'|\[[^]]*\]|[\d.]+", "#", self.what)[:120]
        return f"{self.surface} {kind} {rest}"


@dataclass
class Report:
    """What many cases gave: how many of each surface returned or were refused, and what failed."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of processor time
    troubles: list[Trouble] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The number of cases."""
        return sum(counter.total() for counter in self.outcomes.values())

    def add(self, surface: str, counts: Counter[str], seconds: float) -> None:
        """Counts outcomes of a surface."""
        self.outcomes.setdefault(surface, Counter()).update(counts)
        self.seconds[surface] = self.seconds.get(surface, 0.0) + seconds

    def add_trouble(self, trouble: Trouble) -> None:
        """Keeps it, tried again alone, unless some like it are there."""
        alike = [other for other in self.troubles if other.signature == trouble.signature]
        if len(alike) >= TOLD:
            alike[0].alike += 1
        else:
            self.troubles.append(_tried_alone(trouble))


def run_case(number: int, talks: bool = False) -> str:
    """Makes one case in this process; the outcome: "returned" or the kind of the refusal.

    Raises:
        Finding: the case failed.
    """
    case = Case(number, talks)
    case.say(f"# case {number}: {surface_of(number).name}")
    case.seed_generators()
    try:
        surface_of(number).run(case)
    except Refused as refusal:
        return refusal.kind
    finally:
        case.close()
    return "returned"


def run_cases(
    batches: Iterable[list[int]],
    jobs: int = 1,
    progress: Callable[[Report], None] = lambda report: None,
    accepts_poor_refusals: bool = False,
) -> Report:
    """Makes all cases, in `jobs` workers at a time.

    batches: each of cases of one surface. progress: called after every batch. accepts_poor_refusals: they are counted,
    and are no findings.
    """
    report = Report()
    waiting, coming = deque[list[int]](), iter(batches)
    with selectors.DefaultSelector() as selector:
        while True:
            while len(selector.get_map()) < jobs:
                numbers = waiting.popleft() if waiting else next(coming, None)
                if numbers is None:
                    break
                worker = _Worker(numbers, accepts_poor_refusals=accepts_poor_refusals)
                selector.register(worker.pipe, selectors.EVENT_READ, worker)
            if not selector.get_map():
                return report
            for key, _ in selector.select():
                worker = key.data
                if worker.read():
                    continue
                selector.unregister(worker.pipe)
                rest = worker.finish(report)
                if rest:
                    waiting.append(rest)
                progress(report)


def tell_case(number: int) -> tuple[str, str, str]:
    """Makes one case in a process of its own: its script, its outcome, and what went wrong ("" where nothing did)."""
    worker, report = _Worker([number], talks=True), Report()
    while worker.read():
        pass
    found: list[Trouble] = []
    worker.finish(report, found.append)
    (counts,) = report.outcomes.values()
    return worker.output, next(iter(counts)), found[0].what if found else ""


def _tried_alone(trouble: Trouble) -> Trouble:
    """The same of a process of its own, with the script of the case."""
    trouble.script, _, what = tell_case(trouble.number)
    trouble.alone = bool(what)
    return trouble


class _Worker:
    """A forked process that makes the cases of a batch, seen from the parent."""

    def __init__(self, numbers: list[int], *, talks: bool = False, accepts_poor_refusals: bool = False) -> None:
        self._numbers, self._talks, self._accepts = numbers, talks, accepts_poor_refusals
        self._surface = surface_of(numbers[0])
        self._outcomes = mmap.mmap(-1, len(numbers))  # one byte for each case, seen by both processes
        self._folder = tempfile.mkdtemp(prefix="fuzzing-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self._received = b""
        self.pipe, end = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._process = os.fork()
        if self._process == 0:
            os.close(self.pipe)
            status = 1
            try:
                self._work(end)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(end)

    def read(self) -> bool:
        """Takes what the worker wrote; False once it ended."""
        chunk = os.read(self.pipe, 1 << 16)
        self._received += chunk
        return bool(chunk)

    def finish(self, report: Report, found: Callable[[Trouble], None] | None = None) -> list[int]:
        """Adds to the report what became of the cases; those that are still to be made."""
        os.close(self.pipe)
        _, status, usage = os.wait4(self._process, 0)
        shutil.rmtree(self._folder, ignore_errors=True)
        found = found or report.add_trouble
        done = self._outcomes.find(b"\0")
        done = len(self._numbers) if done < 0 else done
        counts = Counter(_OUTCOMES[outcome] for outcome in self._outcomes[:done])
        for number, what in re.findall(r"^\x1e(\d+) (.*)$", self._text, re.MULTILINE):
            found(Trouble(int(number), self._surface.name, what))
        if done < len(self._numbers):
            counts["died"] += 1
            found(Trouble(self._numbers[done], self._surface.name, self._cause_of_death(status)))
        report.add(self._surface.name, counts, usage.ru_utime + usage.ru_stime)
        return self._numbers[done + 1 :]

    @property
    def output(self) -> str:
        """What the worker wrote beside its findings."""
        return re.sub(r"^\x1e.*\n?", "", self._text, flags=re.MULTILINE)

    @property
    def _text(self) -> str:
        return self._received.decode(errors="replace")

    def _cause_of_death(self, status: int) -> str:
        if not os.WIFSIGNALED(status):
            return f"the process ended with exit status {os.waitstatus_to_exitcode(status)}"
        number = os.WTERMSIG(status)
        if number == signal.SIGPROF:
            return f"hangs: more than {self._surface.seconds:g} seconds of processor time"
        if number == signal.SIGALRM:
            return f"hangs: more than {WALL_SECONDS:g} seconds"
        return f"crash: {signal.Signals(number).name}"

    # In the worker.

    def _work(self, end: int) -> None:
        """Makes the cases; an outcome is noted when it is known, so the first without one is where a worker died."""
        notes = os.fdopen(end, "w", buffering=1, errors="replace")
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(end if self._talks and descriptor else quiet, descriptor)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGPROF, file=2, chain=True)
        os.chdir(self._folder)
        tempfile.tempdir = self._folder
        warnings.simplefilter("ignore")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + self._surface.memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for place, number in enumerate(self._numbers):
            # Set anew for each case; both signals end the process also where it does not return to Python.
            signal.setitimer(signal.ITIMER_PROF, self._surface.seconds)
            signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
            try:
                kind = run_case(number, self._talks)
            except BaseException as error:
                is_accepted = self._accepts and isinstance(error, PoorRefusal)
                kind = "poor refusal" if is_accepted else "finding"
                what = str(error) if isinstance(error, Finding) else f"fault of the fuzzer: {error!r}"
                if not is_accepted:
                    notes.write(f"\x1e{number} {_shortened(' '.join(what.split()))}\n")
                if self._talks:
                    _print_traceback(error)
            self._outcomes[place] = _OUTCOMES.index(kind if kind in _OUTCOMES else _OUTCOMES[-1])
        sys.stdout.flush()


def _shortened(text: str) -> str:
    return text if len(text) < 400 else f"{text[:300]} ... {text[-80:]}"


def _print_traceback(error: BaseException) -> None:
    cause = error.__cause__ if isinstance(error, Finding) else error
    if cause is not None:
        lines = "".join(traceback.format_exception(cause)).splitlines()
        print("\n".join(line[:300] for line in lines[:-1][-14:]), flush=True)


def prepare_parent() -> None:
    """Makes this process one whose forks are cheap and sound: one thread, everything imported, nothing to collect."""
    torch.set_num_threads(1)
    for package in (bert_fast.torch, bert_fast.reference):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
