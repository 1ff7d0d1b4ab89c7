"""`make kernels`: all that a change to a Triton kernel or its launcher makes due, in order, until a step fails.

    python -m tools.kernels [--all]

Seconds where nothing changed. What changed are files of bert_fast/triton that differ from the commit that last wrote
tests/rehearsal.json, and the families whose kernels need them; --all takes every family.

    interpreter  the tests of these families in Triton's interpreter
    gate         every configuration that is new compiled for every chip, by the newest Triton and the oldest; writes
                 the tables
    rehearsal    every launch on every chip, over the null driver; writes its record
    witness      cases of kernels that are new, run by their PTX for two chips and by two Tritons; writes its record
    owed         kernels that no GPU result is of
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable

from benchmarks.kit.programs import KERNELS, imports, kernel_digests
from benchmarks.kit.record import ROOT
from tools import check
from tools.null_driver import rehearsal
from tools.witness import record as witness

OLDEST = {"PYTHONPATH": ".compat"}  # where the oldest Triton that is supported is installed


def is_due() -> bool:
    """Whether kernels, launchers or the gate's tables are others than those the records are of."""
    if any(found["sources"] != rehearsal.sources(chip) for chip, found in rehearsal.read().items()):
        return True
    return any(run["kernels"] != dict(sorted(kernel_digests().items())) for run in witness.read().values())


def changed_files() -> list[str] | None:
    """Files of bert_fast/triton that differ from those the records are of; None where git cannot say."""
    git = ["git", "-C", str(ROOT)]
    asked = subprocess.run(
        [*git, "log", "-1", "--format=%H", "--", str(rehearsal.RECORD)], capture_output=True, text=True, check=False
    )
    commit = asked.stdout.strip()
    if not commit:
        return None
    said = subprocess.run(
        [*git, "diff", "--name-only", commit, "--", str(KERNELS)], capture_output=True, text=True, check=True
    )
    return [line.rsplit("/", 1)[1].removesuffix(".py") for line in said.stdout.split() if line.endswith(".py")]


def families_of(files: Iterable[str]) -> list[str]:
    """Families of ops that need one of these files of bert_fast/triton, directly or not."""
    changed = set(files)
    families = (path.stem for path in KERNELS.glob("*.py") if not path.stem.startswith("_"))
    return sorted(family for family in families if changed & ({family} | imports(family)))


def interpreter_tests(families: Iterable[str]) -> list[str]:
    """Files of tests of these families, from the project's root."""
    found = [
        path.relative_to(ROOT).as_posix()
        for family in families
        for folder in ("kernels", "ops", "optim")
        for path in (ROOT / "tests" / folder).glob(f"test_{family}*.py")
    ]
    return sorted({*found, *(["tests/optim"] if "optimizer" in families else [])})


def run(families: list[str]) -> list[check.Outcome]:
    """Every step until one fails."""
    python = [sys.executable, "-m"]
    gate, seen = [*python, "benchmarks.aot", "--quick"], [*python, "tools.witness", "--record", "--changed"]
    steps: list[tuple[str, list[str], dict[str, str]]] = []
    if tests := interpreter_tests(families):  # pytest would take all where none is named
        command = [sys.executable, *check.pytest_arguments("interpreter", *tests)]
        steps.append(("interpreter", command, check.WORKER_VARIABLES | {"TRITON_INTERPRET": "1"}))
    steps += [
        ("gate", gate, {}),
        ("gate, oldest", gate, OLDEST),
        ("rehearsal", [*python, "tools.null_driver.rehearsal", "--record"], {}),
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
    is_all = parser.parse_args(arguments).all
    if not is_all and not is_due():
        print("nothing is due: kernels and launchers are those of the records")
        return 0
    start, changed = time.monotonic(), None if is_all else changed_files()
    every = [path.stem for path in KERNELS.glob("*.py")]
    families = families_of(every if changed is None else changed)
    print(f"families: {', '.join(families) or 'none'}")
    return check.report(run(families), start)


if __name__ == "__main__":
    sys.exit(main())
