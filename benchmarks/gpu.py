"""`make gpu`: all that a GPU is needed for, within nine minutes, the most important first; needs no network.

    python -m benchmarks.gpu [--results FOLDER] [--commit HASH] [--minutes N]

Every part runs in processes of its own (a kernel that crashes the device's context takes its own process with it) and
has a budget; what an earlier part does not use goes to those after it, so a part always has at least its budget. A
process that overruns is killed with all it started and recorded as killed; later parts still run. Results are lines of
FOLDER/<gpu>.jsonl, written as they come. `docs/benchmarks.md` has the parts, the order and the fields.

This process imports no torch.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from benchmarks import gpu_status
from benchmarks.parts import Run
from benchmarks.record import RESULTS, ROOT, Recorder, slug
from benchmarks.summary import summary

__all__ = ["Part", "Process", "parts_of", "run_parts"]

GRACE_S = 3.0  # between asking a process to end and ending it
# A process group, where Python can: what ends this process together with its terminal ends those of the group, too.
OWN_GROUP: Any = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
# Set by a user for other runs; here they would change what is measured.
CLEARED_VARIABLES = ("BERT_FAST_BACKEND", "BERT_FAST_DEBUG", "BERT_FAST_NATIVE", "TRITON_INTERPRET")


@dataclass(frozen=True)
class Process:
    """One command of a part; "{seconds}" in it becomes what the part has left when it starts."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Processes that run at once, and the seconds they have."""

    name: str
    budget_s: float
    processes: tuple[Process, ...]


def parts_of(run_file: Path, families: Mapping[str, int], cores: int) -> list[Part]:
    """The parts in order. Their budgets sum up to 520 s, which leaves 20 for starting and for the summary.

    What is verified comes before what is timed, since red cases are not timed; tests at full shapes repeat `verify` on
    more shapes and dtypes, so they come second; steps are what the kernels are for; all that follows adds to results
    that stand without it.

    families: name -> number of cases, by which the time to time them is shared out; starting counts as two cases.
    """
    python = (sys.executable, "-m")
    run = ("--run", str(run_file))
    # Families side by side: most of the time is Triton's and the compiler's, which run on the CPU. The same setting for
    # `compile` and `time`, so that nothing keeps the second from what the first has stored.
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, min(8, cores // max(1, len(families)))))}

    def part(name: str, family: str) -> Process:
        command = (*python, "benchmarks.parts", name, *run, "--family", family, "--seconds", "{seconds}")
        return Process(f"{name} {family}".strip(), command, threads)

    def at_once(name: str, budget_s: float, *others: Process) -> Part:
        return Part(name, budget_s, (*(part(name, family) for family in families), *others))

    def in_turn(name: str, budget_s: float) -> list[Part]:
        each = budget_s / sum(count + 2 for count in families.values())
        return [Part(f"{name} {f}", each * (count + 2), (part(name, f),)) for f, count in families.items()]

    workers = ("-n", str(min(4, cores // 2))) if cores >= 4 and importlib.util.find_spec("xdist") else ()
    limit = ("--timeout", "60") if importlib.util.find_spec("pytest_timeout") else ()
    tests = (*python, "pytest", "-q", "-m", "gpu", "-p", "benchmarks.gpu_tests", "--gpu-run", str(run_file))
    tests += (*workers, *limit, "--durations", "5", *gpu_test_files())
    sanitizers = [(tool, family) for tool in ("memcheck", "racecheck") for family in families]
    return [
        Part("extension", 35, (Process("extension", (sys.executable, "setup.py", "-q", "build_ext", "--inplace")),)),
        at_once("verify", 75),
        Part("tests", 60, (Process("tests", tests),)),
        Part("ceilings", 12, (part("ceilings", ""),)),
        at_once("compile", 65, part("prepare", ""), part("prepare", "steps")),
        *in_turn("time", 100),
        Part("steps", 35, (part("steps", ""),)),
        Part("runs", 25, (part("runs", ""),)),
        Part("gemm", 25, (part("gemm", ""),)),
        Part("peers", 15, (part("peers", ""),)),
        Part("tiles", 10, (part("tiles", ""),)),
        Part("models", 8, (part("models", ""),)),
        Part("sanitizer", 30, tuple(
            Process(f"{tool} {family}", (*python, "benchmarks.sanitize", tool, "--family", family, *run,
                    "--port", str(49152 + 32 * i)))
            for i, (tool, family) in enumerate(sanitizers)
        )),
        Part("compiled", 17, (part("steps", "compiled"),)),
        # Tiles that are the likeliest to hang: nothing comes after them.
        Part("specialized", 8, (part("gemm", "specialized"),)),
    ]  # fmt: skip


def gpu_test_files() -> list[str]:
    """Files below tests/ that mark tests with `gpu`; nothing else is imported, hence nothing else must be installed."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text(encoding="utf-8")]


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
    _say(f"[{begin - start:5.0f} s] == {part.name}: at most {seconds:.0f} s", log)
    running: list[_Running] = []
    lines = []
    try:
        running += (_Running(process, seconds, log) for process in part.processes)
        while any(r.status is None for r in running) and time.monotonic() < begin + seconds:
            time.sleep(0.02)
        killed = [r for r in running if r.status is None]
        _end(killed)
        for r in running:
            outcome = "killed" if r in killed else "ok" if r.status == 0 else "failed"
            fields = {"part": part.name, "process": r.name, "outcome": outcome, "status": r.status}
            lines.append(recorder.write("part", **fields, seconds=r.seconds, allowed_s=round(seconds, 1)))
            if outcome != "ok":
                _say(f"[{time.monotonic() - start:5.0f} s] {r.name}: {outcome} after {r.seconds} s", log)
    finally:
        _end(running)
    return lines


class _Running:
    """A process that has been started, in a group of its own so that it can be ended with everything it starts."""

    def __init__(self, process: Process, seconds: float, log: IO[str]) -> None:
        self.name = process.name
        self._start = time.monotonic()
        self._took: float | None = None
        left = f"{max(1.0, seconds - GRACE_S):.1f}"
        environment = {key: value for key, value in os.environ.items() if key not in CLEARED_VARIABLES}
        self.popen = subprocess.Popen(
            [word.replace("{seconds}", left) for word in process.command], cwd=ROOT,
            env=environment | process.environment | {"PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL,
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

    def _echo(self, log: IO[str]) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            _say(f"  {self.name}: {line.decode(errors='replace').rstrip()}", log)


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


def _say(text: str, log: IO[str]) -> None:
    print(text, flush=True)
    log.write(text + "\n")
    log.flush()


_PROBE = """
import json, sys, torch
from benchmarks.record import gpu_environment
from benchmarks.registry import family_names, kernel_cases
if torch.cuda.is_available():
    counts = {name: len(kernel_cases("gpu", [name])) for name in family_names()}
    print(json.dumps([gpu_environment("cuda", sys.argv[1] or None), counts]))
"""


def _probe(commit: str | None) -> tuple[dict[str, Any], dict[str, int]] | None:
    """(what stands in every line, cases of each family); None without a device. This process stays without torch."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, commit or ""], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit("the benchmarks could not be imported: the reason is above")
    answer = done.stdout.strip().splitlines()[-1:]
    return tuple(json.loads(answer[0])) if answer else None


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if a part failed or was killed, or a case was red."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results; default: %(default)s")
    parser.add_argument("--commit", help="of a copy of the project without its history")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything; budgets are scaled to it")
    options = parser.parse_args(arguments)
    found = _probe(options.commit)
    if found is None:
        print(f"no CUDA or ROCm device that the torch of {sys.executable} can use: nothing was run")
        return 1
    environment, families = found
    options.results.mkdir(parents=True, exist_ok=True)
    name = slug(environment["gpu"])
    recorder = Recorder((options.results / f"{name}.jsonl").absolute(), environment)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that `finally` ends what is running
    with tempfile.TemporaryDirectory() as folder, open(options.results / f"{name}.log", "w", encoding="utf-8") as log:
        run_file = Path(folder) / "run.json"
        Run(str(recorder.path), environment).write(run_file)
        parts = parts_of(run_file, families, os.cpu_count() or 1)
        scaled = [replace(part, budget_s=part.budget_s * options.minutes / 9) for part in parts]
        lines = run_parts(scaled, recorder, log)
        # Earlier results count too, where this run's are kept elsewhere.
        owed = gpu_status.owed(options.results, gpu_status.RESULTS)
        _say(summary(recorder, lines, [f"{file}: {kernel} ({source})" for file, kernel, source in owed]), log)
    red = [line for line in recorder.of_this_run("verify") if not line["ok"]]
    return 1 if red or any(line["outcome"] != "ok" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
