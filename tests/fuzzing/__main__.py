"""A fuzzer of the whole Python surface: random arguments, inputs and damaged files, in processes that may die.

    python -m tests.fuzzing --case NUMBER                    one case, printed as a script while it is made
    python -m tests.fuzzing --cases 1000000 --jobs 2         the long run, by hand (about 40 minutes on two cores)
    python -m tests.fuzzing --surface ops --cases 1000       one surface; without --cases what CI makes of it
    python -m tests.fuzzing --list                           surfaces, their numbers and shares

A case passes if it returns and what came back stands up to a few cheap questions, or if the library refuses as
`rules.py` says. It fails if the process dies, hangs or takes too much memory, on any other exception, and on a wrong
result. One integer names a case for good, as long as the code that draws it does not change.

Why not Hypothesis: it wants to see each example end, so a process that may die would have to be started for each, and
it spends a millisecond and more on one drawing; a seeded generator makes hundreds of cases a second, in forks of one
process, and an integer is easier to hand on than a database of examples. What is lost is shrinking: cases are small
from the start instead, and a failing one prints itself.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # before the library reads it: no name of a model is looked up anywhere

from .surfaces import SURFACES, Surface, numbers_of, surface_named
from .workers import BATCH, Report, prepare_parent, run_cases, tell_case


def batches(surfaces: list[tuple[Surface, int]], seed: int) -> Iterator[list[int]]:
    """The numbers of this many cases of each surface, in batches, the surfaces in turns."""
    queues = []
    for surface, count in surfaces:
        numbers = numbers_of(surface, seed, count)
        size = max(1, min(BATCH, -(-count // 8)))
        queues.append([numbers[start : start + size] for start in range(0, count, size)])
    places = [(index / len(queue), which, index) for which, queue in enumerate(queues) for index in range(len(queue))]
    for _, which, index in sorted(places):
        yield queues[which][index]


def table(report: Report) -> str:
    """Cases, cases a second of one core, and outcomes of each surface."""
    lines = []
    for name, counts in sorted(report.outcomes.items()):
        kinds = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
        rate = counts.total() / max(report.seconds[name], 1e-9)
        lines.append(f"{name:<20} {counts.total():>8} cases {rate:>7.0f}/s   {kinds}")
    return "\n".join(lines)


class _Progress:
    """A line every few seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._start, self._last = total, time.monotonic(), time.monotonic()

    def __call__(self, report: Report) -> None:
        now = time.monotonic()
        if now - self._last >= 10:
            self._last = now
            rate = report.total / (now - self._start)
            found = len(report.troubles)
            print(f"{report.total} of {self._total} cases, {rate:.0f}/s, {found} findings", file=sys.stderr, flush=True)


def shares(surfaces: list[Surface], cases: int | None) -> list[tuple[Surface, int]]:
    """How many cases of each."""
    if cases is None:
        return [(surface, surface.in_ci) for surface in surfaces]
    if len(surfaces) == 1:
        return [(surfaces[0], cases)]
    whole = sum(surface.share for surface in surfaces)
    return [(surface, round(cases * surface.share / whole)) for surface in surfaces]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=int, help="make this one case and print it")
    parser.add_argument("--surface", action="append", help="only this surface (may be given more than once)")
    parser.add_argument("--cases", type=int, help="how many, shared out among the surfaces; default: what CI makes")
    parser.add_argument("--seed", type=int, default=0, help="the first case of each surface; CI makes those from 0")
    parser.add_argument("--jobs", type=int, default=1, help="workers at a time")
    parser.add_argument("--accept-poor-refusals", action="store_true", help="count exceptions of any kind as refusals")
    parser.add_argument("--list", action="store_true", help="name the surfaces")
    arguments = parser.parse_args()
    if arguments.list:
        for place, surface in enumerate(SURFACES):
            print(f"{place:02d} {surface.name:<20} share {surface.share:<5g} in CI {surface.in_ci}")
        return 0
    prepare_parent()
    if arguments.case is not None:
        script, outcome, what = tell_case(arguments.case)
        print(f"{script}{outcome}{': ' if what else ''}{what}")
        return 1 if what else 0
    chosen = [surface_named(name) for name in arguments.surface or ()] or list(SURFACES)
    plan = shares(chosen, arguments.cases)
    progress = _Progress(sum(count for _, count in plan))
    report = run_cases(batches(plan, arguments.seed), arguments.jobs, progress, arguments.accept_poor_refusals)
    print(table(report))
    for trouble in report.troubles:
        print(trouble)
    print(f"{report.total} cases, {len(report.troubles)} findings")
    return 1 if report.troubles else 0


if __name__ == "__main__":
    status = main()
    gc.unfreeze()  # or the interpreter's end would take what was frozen for leaked
    sys.exit(status)
