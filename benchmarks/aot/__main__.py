"""The ahead-of-time gate: every Triton kernel, in every launch configuration that ships, compiled without a GPU.

    python -m benchmarks.aot            compiles kernels that differ from the record, and writes their budgets
    python -m benchmarks.aot --all      compiles all of them
    python -m benchmarks.aot --check    writes nothing; exit 1 where a kernel differs, or a sample does not agree
    python -m benchmarks.aot --family layer_norm --target sm_90 --only "H=768 bf16"
                                        compiles and prints a part, row by row (each option may be given repeatedly)

What is compiled is what ships: the launchers are called, with a recorder in the place of Triton's launcher
(`launches.py`). What was measured is remembered in `build/aot` (`compile.py`), so only what changed is compiled again.

The record (`tools/kernel_record.py`) has a line for each kernel and target: its budget (`budgets.py`) and a digest of
all that decides it, which are the programs of the kernel and its helpers, signatures, constants, options and Triton's
version. The newest Triton writes lines of all targets, the oldest its own of sm_90. Of another version the record has
nothing: `--check` compiles one configuration in 4 and holds it to what is true of any compiler (`check.py`).
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable
from time import monotonic
from typing import Any

from benchmarks.aot import budgets
from benchmarks.aot.check import problems_of, with_dropout_cost
from benchmarks.aot.compile import code_of, measure
from benchmarks.aot.device import CARDS, EVERY
from benchmarks.aot.launches import Configuration, configurations
from benchmarks.aot.text import text
from benchmarks.registry import family_names
from bert_fast.terminal import Part, StatusLine
from tools import kernel_record

# One configuration in so many is compiled by `--check` though nothing changed; of another Triton's; fewer of cards'.
_ONE_IN, _ONE_IN_OF_ANOTHER_TRITON, _FEWER_OF_CARDS = 32, 4, 8

Wanted = dict[str, list[Configuration]]  # by target


def measured(wanted: Wanted) -> dict[str, dict[str, Any]]:
    """Rows of these configurations, with a line on standard error that says how far it is."""
    line = StatusLine(is_transient=True)

    def report(done: int, total: int) -> None:
        line.show([Part(f"compiled {done} of {total}", 0)], done / total)

    with contextlib.closing(line):
        line.open(is_patient=True)
        return with_dropout_cost(measure(wanted, report))


def part(families: list[str], targets: list[str], only: list[str]) -> Wanted:
    """What the filters admit. only: words of which a name must hold all."""

    def admitted(name: str) -> bool:
        # The kernel without dropout is measured with the one that drops: the price is their difference.
        return all(word in name or word in name.replace(" plain", " dropout") for word in only)

    return {target: [one for one in configurations(families, target) if admitted(one.name)] for target in targets}


def every_configuration(targets: Iterable[str] = EVERY) -> Wanted:
    """What ships, by target."""
    return part(family_names(), [*targets], [])


def suffix_of(triton_version: str) -> str | None:
    """What follows a target in the record's keys; None of a Triton that it has nothing of."""
    versions = kernel_record.read()["triton"]
    return {versions["newest"]: "", versions["oldest"]: " oldest"}.get(triton_version)


def is_newer(triton_version: str) -> bool:
    """Whether this Triton is newer than the record's, which it replaces."""
    numbers = ([int(part) for part in version.split("+")[0].split(".")[:3]]
               for version in (triton_version, kernel_record.read()["triton"]["newest"]))  # fmt: skip
    mine, known = numbers
    return mine > known


def digests(wanted: Wanted, suffix: str = "") -> dict[str, str]:
    """Key of the record -> digest of what its configurations are compiled from now; kernel by kernel."""
    groups = {target: budgets.grouped(ones) for target, ones in wanted.items()}
    return {
        f"{kernel} {target}{suffix}": budgets.digest(code_of(one, target) for one in found[kernel])
        for kernel in dict.fromkeys(kernel for found in groups.values() for kernel in found)
        for target, found in groups.items()
        if kernel in found
    }


def sample(wanted: Wanted, one_in: int) -> Wanted:
    """One configuration in so many, drawn by what decides it."""
    return {
        target: [
            one
            for one in ones
            if int(code_of(one, target), 16) % (one_in * (_FEWER_OF_CARDS if target in CARDS else 1)) == 0
        ]
        for target, ones in wanted.items()
    }


def check(wanted: Wanted, suffix: str | None) -> list[str]:
    """What is wrong: kernels that are not those of the record, and what a sample shows."""
    if suffix is None:
        return problems_of(measured(sample(wanted, _ONE_IN_OF_ANOTHER_TRITON)))
    current, recorded = digests(wanted, suffix), kernel_record.read()["compiled"]
    problems = [f"{key}: differs from the record; run make kernels" for key in kernel_record.stale("compiled", current)]
    gone = [key for key in recorded if key.endswith(" oldest") == bool(suffix) and key not in current]
    problems += [f"{key}: in the record, and not compiled any more; run make kernels" for key in gone]
    rows = measured(sample(wanted, _ONE_IN))
    for key, row in rows.items():
        target = key.rsplit(" ", 1)[1]
        budget = recorded.get(f"{budgets.kernel_of(key)} {target}{suffix}")
        problems += budgets.beyond(key, row, budget) if budget else []
    return problems + problems_of(rows)


def record(wanted: Wanted, suffix: str, triton_version: str, *, everything: bool) -> list[str]:
    """Compiles kernels that differ, and writes their budgets if nothing is wrong; says what grew and what fell."""
    current = digests(wanted, suffix)
    keys = [*current] if everything else kernel_record.stale("compiled", current)
    stale = {
        target: [one for one in ones if f"{budgets.kernel_of(one.name)} {target}{suffix}" in keys]
        for target, ones in wanted.items()
    }
    rows = measured(stale)
    problems = problems_of(rows)
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, row in rows.items():
        groups.setdefault(f"{budgets.kernel_of(name)} {name.rsplit(' ', 1)[1]}{suffix}", []).append(row)
    found = {key: budgets.budget(group) for key, group in groups.items()}
    recorded = kernel_record.read()["compiled"]
    for sign, lines in zip("+-", budgets.differences(found, recorded), strict=True):
        print("".join(f"{sign} {line}\n" for line in lines), end="")
    if not problems:
        of_the_other = [key for key in recorded if key.endswith(" oldest") != bool(suffix)]
        order = [*of_the_other, *current] if suffix else [*current, *of_the_other]
        which = "oldest" if suffix else "newest"
        kernel_record.update("compiled", found, order, {which: triton_version})
        print(f"written: {len(found)} of {len(current)} kernels and targets")
    return problems


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot", description="Ahead-of-time gate of all kernels.")
    parser.add_argument("--check", action="store_true", help="compare with the record instead of writing it")
    parser.add_argument("--all", action="store_true", help="compile what the record has, too")
    parser.add_argument("--family", action="append", choices=family_names(), help="this op family only")
    parser.add_argument("--target", action="append", choices=list(EVERY), help="this GPU architecture only")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="names that contain TEXT only")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler by the interpreter; unset it")
    import triton

    start, suffix = monotonic(), suffix_of(triton.__version__)
    if options.family or options.target or options.only:
        rows = measured(part(sorted(options.family or family_names()), options.target or [*EVERY], options.only))
        print(text(rows))
        problems = problems_of(rows)
    else:
        wanted = every_configuration(["sm_90"] if suffix == " oldest" else EVERY)
        if options.check:
            problems = check(wanted, suffix)
        elif suffix is None and not is_newer(triton.__version__):
            parser.error(f"the record is of the newest Triton and of the oldest, not of {triton.__version__}")
        else:
            problems = record(wanted, suffix or "", triton.__version__, everything=options.all)
    print(f"{monotonic() - start:.0f} s, Triton {triton.__version__}")
    for problem in problems:
        print(f"FAIL {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
