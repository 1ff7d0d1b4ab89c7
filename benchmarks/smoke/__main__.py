"""`make gpu-smoke`: every kernel once on a GPU, within 90 seconds; the first thing to run on one. Needs no network.

    python -m benchmarks.smoke [--results FOLDER] [--commit HASH] [--families NAMES] [--only-red FILE]
    python -m benchmarks.smoke --device sm_90    # over the null driver: all is compiled and launched, nothing runs

A family has a process of its own, started again after a crash or a hang. Results are lines of FOLDER/<gpu>.jsonl,
written as they come. The last line names what is red and what the time did not suffice for; the exit status is 1 then.
`docs/benchmarks.md` says what is run and has the fields.

This process imports no torch.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.families import family_names
from benchmarks.gpu.run import CACHE_VARIABLES
from benchmarks.kit.assembler import use_assembler
from benchmarks.kit.record import RESULTS, ROOT, Recorder, read_lines, slug
from benchmarks.smoke.case import WHOLE
from benchmarks.smoke.report import GOOD, case_text, environment_line, kernel_table, verdict
from benchmarks.smoke.supervisor import Job, Supervisor
from benchmarks.smoke.worker import ENVIRONMENT

WORKER = (sys.executable, "-m", "benchmarks.smoke.worker")
SECONDS = 90.0  # for everything
MARGIN_S = 2.0  # of them for what is said at the end
CASE_S, START_S = 30.0, 60.0  # the longest that a case, and what comes before a process' first, may take
# The longest first: with fewer processors than families they wait for one another.
SHARES = {"attention": 3}  # processes of a family, where there are more than one: many kernels that compile for long
LONGEST = ("attention", WHOLE, "linear_cross_entropy", "mlp", "linear_gelu", "encoder_layer")


class NoDevice(Exception):
    """There is nothing to run on."""


class _Smoke:
    """A run: where its lines go, once it is known what they depend on."""

    def __init__(self, environment: "Future[dict[str, Any] | None]", results: Path, device: str) -> None:
        self._environment, self._results, self._device = environment, results, device
        self._recorder: Recorder | None = None
        self.lines: list[dict[str, Any]] = []

    def recorder(self) -> Recorder:
        """Waits for the environment, which is the first to be said."""
        if self._recorder is None:
            environment = self._environment.result()
            if environment is None:
                raise NoDevice(f"no CUDA or ROCm device that the torch of {sys.executable} can use")
            print(environment_line(environment), flush=True)
            name = slug(environment["gpu"] or f"smoke {self._device}")
            self._recorder = Recorder((self._results / f"{name}.jsonl").absolute(), environment)
        return self._recorder

    def tell(self, **fields: Any) -> None:
        line = self.recorder().write("smoke", **fields)
        self.lines.append(line)
        print(case_text(line), flush=True)

    def finish(self, left: list[Job]) -> int:
        """Says what is to be said at the end; the exit status."""
        not_run = []
        for job in left:
            for name in () if job.blocking else job.cases or [job.name]:
                which = {} if job.cases else {"share": job.share}
                self.recorder().write("smoke", family=job.family, case=name, outcome="not run", error=None,
                                      blocking=False, **which)  # fmt: skip
                not_run.append(name if job.cases else f"all of {name}")
        recorder = self.recorder()
        print(kernel_table(self.lines))
        print(f"smoke figures, not results; all of it: {recorder.path}")
        kernels = {name for line in self.lines for name in line.get("kernels") or ()}
        print(verdict(self.lines, not_run, len(kernels)), flush=True)
        return 1 if not_run or any(line["outcome"] not in GOOD for line in self.lines) else 0


def _ask(command: list[str], seconds: float) -> dict[str, Any] | None:
    """The environment, by a process that imports torch."""
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoDevice(f"the device has not said what it is within {seconds:.0f} s") from None
    if done.returncode != 0:
        raise NoDevice("the benchmarks could not be imported, the reason is above")
    return json.loads(done.stdout)["environment"]


def red_jobs(path: Path) -> list[Job]:
    """The cases that were not green when they were last run, by a file; processes that named none."""
    lines = [line for line in read_lines(path) if line.get("kind") == "smoke" and not line["blocking"]]
    last = {line["case"]: line for line in lines}
    cases: dict[str, list[str]] = {}
    jobs: list[Job] = []
    for case, line in last.items():
        if "share" not in line and line["outcome"] not in GOOD:
            cases.setdefault(line["family"], []).append(case)
        elif "share" in line and line["run"] == lines[-1]["run"]:  # its cases were not named
            jobs.append(Job(line["family"], share=line["share"]))
    return [*jobs, *(Job(family, names) for family, names in cases.items())]


def all_jobs(families: Iterable[str]) -> list[Job]:
    """A job for every family, or several."""
    counts = ((family, SHARES.get(family, 1)) for family in families)
    return [Job(family, share=f"{i}/{count}") for family, count in counts for i in range(count)]


def in_order(families: Iterable[str]) -> list[str]:
    """Those that take longest first."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    return sorted(families, key=lambda name: (rank.get(name, len(rank)), name))


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if something is red or was not run."""
    assert __doc__ is not None
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoke", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="folder of the results; default: benchmarks/results")
    parser.add_argument("--commit", help="of a copy of the project without its history")
    parser.add_argument("--families", help="some only, separated by commas")
    parser.add_argument("--only-red", type=Path, metavar="FILE", help="cases that were not green in a file of results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything; default: %(default)s")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, or one that tools/null_driver knows (sm_90)")
    parser.add_argument("--size", default="smoke", choices=("smoke", "small"), help="of the cases")
    parser.add_argument("--case-seconds", type=float, default=CASE_S, help="after which a case hangs; %(default)s")
    parser.add_argument("--jobs", type=int, default=max(2, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--ptxas", type=Path, help="make kernels by this one instead of Triton's own")
    options = parser.parse_args(arguments)
    if options.ptxas is not None:
        use_assembler(options.ptxas)
    known = in_order([WHOLE, *family_names()])
    families = options.families.split(",") if options.families else known
    if wrong := [name for name in families if name not in known and "." not in name]:
        parser.error(f"no family {', '.join(wrong)}; there are {', '.join(known)}")
    jobs = red_jobs(options.only_red) if options.only_red else all_jobs(families)
    if not jobs:
        print(f"nothing is red in {options.only_red}")
        return 0
    if options.device == "cuda":  # what is compiled here, `make gpu` finds
        for variable, folder in CACHE_VARIABLES.items():
            os.environ.setdefault(variable, str(folder))
    results = options.results or (RESULTS if options.device == "cuda" else ROOT / "build" / "smoke")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that `finally` ends what is running
    worker = (*WORKER, "--device", options.device, "--size", options.size)
    ask = [*worker, "--family", ENVIRONMENT, *(("--commit", options.commit) if options.commit else ())]
    deadline = start + options.seconds - MARGIN_S
    with ThreadPoolExecutor(1) as pool:
        smoke = _Smoke(pool.submit(_ask, ask, options.seconds - MARGIN_S), results, options.device)
        supervisor = Supervisor(worker, smoke.tell, deadline, options.case_seconds, START_S, options.jobs)
        try:
            return smoke.finish(supervisor.run(jobs))
        except NoDevice as why:
            print(f"{why}: nothing was run")
            return 1


if __name__ == "__main__":
    sys.exit(main())
