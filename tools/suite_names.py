"""Collects the tests twice, in two processes that agree on nothing, and judges the names that they find.

    .venv/bin/python -m tools.suite_names              both at once
    .venv/bin/python -m tools.suite_names elsewhere    the second alone; the first is a run of all tests, which has
                                                       -p tools.suite_names
    .venv/bin/python -m tools.suite_names compare      what these two found

pytest's workers collect for themselves, and nothing is run where one found another name than the other. So names must
not depend on the clock, the hash seed, an address, the folder or the environment: the second process has others, and
works on a copy of the project. And people must be able to read and to type them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOUND = ROOT / "build" / "test_names"  # by the process that found them: here.txt, elsewhere.txt
COPIED = ("benchmarks", "bert_fast", "tests", "tools", "pyproject.toml")  # all else is linked
LONGEST_PARAMETERS = 110
LONGEST = 200
NOT_COPIED = shutil.ignore_patterns("__pycache__")  # the first process writes it meanwhile
SHOWN = 5
UNREADABLE = {
    "not printable ASCII": re.compile(r"[^ -~]"),
    "an escape (bytes, or text that needs a name: pytest.param(..., id=...))": re.compile(r"\\"),
    "an address": re.compile(r" at 0x|0x[0-9a-f]{7,}"),
    "a path from the root": re.compile(r"(?<![\w.\])}])/\w+/"),
    "a row of digits that nobody reads": re.compile(r"[0-9a-f]{20,}"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a run of all tests: keeps their names, those of one process where several share the tests.

    A plugin is called after the hooks of conftest.py, which order the tests, and before pytest leaves any out.
    """
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        keep("here", [item.nodeid for item in items])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("elsewhere", "compare"))
    part = parser.parse_args(arguments).part
    if part == "compare":
        here, elsewhere = (FOUND / f"{name}.txt" for name in ("here", "elsewhere"))
        return judge(here.read_text().splitlines(), elsewhere.read_text().splitlines())
    with tempfile.TemporaryDirectory(prefix="names of tests ") as scratch, ThreadPoolExecutor(2) as processes:
        there = processes.submit(collect_elsewhere, Path(scratch))
        if part == "elsewhere":
            shutil.rmtree(FOUND, ignore_errors=True)
            keep("elsewhere", there.result())
            return 0
        return judge(collect(ROOT, {"PYTHONHASHSEED": "1", "TZ": "Etc/GMT+12"}), there.result())


def keep(process: str, names: list[str]) -> None:
    FOUND.mkdir(parents=True, exist_ok=True)
    (FOUND / f"{process}.txt").write_text("".join(f"{name}\n" for name in names))
    print(f"{len(names)} names")


def judge(here: list[str], there: list[str]) -> int:
    problems = differences(here, there) + [f"{name}: {why}" for name in here for why in unreadable(name)]
    for problem in problems:
        print(problem)
    print(f"{len(here)} names, {len(problems)} problems")
    return 1 if problems else 0


def collect_elsewhere(scratch: Path) -> list[str]:
    """The names as another user would find them on another day, in a copy of the project."""
    project = scratch / "copy"
    project.mkdir()
    for path in ROOT.iterdir():
        if path.name not in COPIED:
            (project / path.name).symlink_to(path)
        elif path.is_dir():
            shutil.copytree(path, project / path.name, ignore=NOT_COPIED)
        else:
            shutil.copy2(path, project)
    (scratch / "shared").symlink_to(ROOT.parent / "shared")  # may lead nowhere there as here
    environment = {"PYTHONHASHSEED": "2", "TZ": "Etc/GMT-14", "LC_ALL": "C", "COLUMNS": "40"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # nobody would read it
    for name in ("HOME", "TMPDIR"):
        folder = scratch / name.lower()
        folder.mkdir()
        environment[name] = str(folder)
    return collect(project, environment, "-p", "tools.other_clock", "--assert=plain")  # nothing is asserted


def collect(project: Path, environment: dict[str, str], *options: str) -> list[str]:
    """The ids of the tests, in order."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    environment = os.environ | {"PYTHONPATH": str(project)} | environment
    run = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(f"{' '.join(command)} in {project} failed (exit {run.returncode})\n{run.stdout}{run.stderr}")
    return run.stdout.split("\n\n", 1)[0].splitlines()


def differences(here: list[str], there: list[str]) -> list[str]:
    if here == there:
        return []
    found = [*_only_in(here, there, "the first process"), *_only_in(there, here, "the second")]
    return found or ["the two processes found the same names in another order"]


def _only_in(names: list[str], others: Iterable[str], process: str) -> list[str]:
    known = set(others)
    only = [name for name in names if name not in known]
    return [f"{name}: only {process} of two found it ({len(only)} such names)" for name in islice(only, SHOWN)]


def unreadable(name: str) -> list[str]:
    """What is wrong with a test's id."""
    parameters = name.partition("[")[2]
    found = [why for why, pattern in UNREADABLE.items() if pattern.search(parameters)]
    if len(parameters) > LONGEST_PARAMETERS or len(name) > LONGEST:
        found.append(f"too long ({len(name)} characters, at most {LONGEST}; parameters, {LONGEST_PARAMETERS})")
    return found


if __name__ == "__main__":
    sys.exit(main())
