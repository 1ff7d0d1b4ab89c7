"""`make kernels`: all that a change to a Triton kernel or its launcher makes due, in order, until a step fails.

    python -m tools.kernels [--all]

Seconds where nothing changed. What is due is what differs from the kernels' record (`tools/kernel_record.py`): kernels
by what they are compiled from, launchers by their programs; comments and names of variables change neither.

    interpreter  the tests of these families in Triton's interpreter
    gate         their configurations compiled for every target, by the newest Triton and by the oldest
    rehearsal    their launches on every chip, over the null driver
    witness      their cases, run by their PTX for two targets and by two Tritons
    owed         kernels that no GPU result is of

Each step but the first and the last writes its section of the record. --all takes every family.
"""

import argparse
import sys
import time
from collections.abc import Iterable

from benchmarks.families import family_names
from benchmarks.kit.programs import families_of
from benchmarks.kit.results import ROOT
from tools import check, kernel_record
from tools.null_driver import rehearsal
from tools.witness import record as witness

OLDEST = {"PYTHONPATH": ".compat"}  # where the oldest Triton that is supported is installed


def due() -> dict[str, list[str]]:
    """Section of the record -> keys that differ from it."""
    from benchmarks.aot.__main__ import digests, every_configuration

    versions = kernel_record.read()["triton"]
    current = {
        "compiled": digests(every_configuration()),
        "rehearsed": rehearsal.digests(),
        "witnessed": {
            key: digest
            for run, version in witness.RUNS.items()
            for key, digest in witness.digests(run, versions[version]).items()
        },
    }
    return {section: kernel_record.stale(section, found) for section, found in current.items()}


def families_that_differ(due: dict[str, list[str]]) -> list[str]:
    """Families of ops to which the keys of `due` belong."""
    kernels = {key.split(" ", 1)[0] for section in ("compiled", "witnessed") for key in due[section]}
    return sorted({*families_of(kernels), *(key.split(" ", 1)[0] for key in due["rehearsed"])})


def interpreter_tests(families: Iterable[str]) -> list[str]:
    """Files of tests of these families, from the project's root."""
    found = [
        path.relative_to(ROOT).as_posix()
        for family in families
        for folder in ("kernels", "ops", "optim")
        for path in (ROOT / "tests" / folder).glob(f"test_{family}*.py")
    ]
    return sorted({*found, *(["tests/optim"] if "optimizer" in families else [])})


def run(families: list[str], *, everything: bool = False) -> list[check.Outcome]:
    """Every step until one fails. everything: what the record has is made again, too."""
    python, again = [sys.executable, "-m"], ["--all"] if everything else []
    gate, seen = [*python, "benchmarks.aot", *again], [*python, "tools.witness", "--record", *again]
    steps: list[tuple[str, list[str], dict[str, str]]] = []
    if tests := interpreter_tests(families):  # pytest would take all where none is named
        command = [sys.executable, *check.pytest_arguments("interpreter", *tests)]
        steps.append(("interpreter", command, check.WORKER_VARIABLES | {"TRITON_INTERPRET": "1"}))
    steps += [
        ("gate", gate, {}),
        ("gate, oldest", gate, OLDEST),
        ("rehearsal", [*python, "tools.null_driver.rehearsal", "--record", *again], {}),
        ("witness", seen, {}),
        ("witness, sm_80", [*seen, "--device", "sm_80"], {}),
        ("witness, oldest", seen, OLDEST),
        ("owed", [*python, "benchmarks.gpu.status"], {}),
    ]
    outcomes = []
    for name, command, environment in steps:
        outcomes += check.run_until_failure({name: command}, environment)
        if outcomes[-1].status != 0:
            break
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if a step failed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="make kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every family, whether something changed or not")
    options, found = parser.parse_args(arguments), due()
    if not (options.all or any(found.values())):
        print("nothing is due: kernels and launchers are those of the record")
        return 0
    start = time.monotonic()
    families = family_names() if options.all else families_that_differ(found)
    print(f"families: {', '.join(families)}")
    return check.report(run(families, everything=options.all), start)


if __name__ == "__main__":
    sys.exit(main())
