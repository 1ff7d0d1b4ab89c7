"""Runs another project's tests twice, on transformers as it is and with every model fused, and compares test by test.

    python -m tools.outer_tests ../transformers/tests/models/roberta
    python -m tools.outer_tests ../sentence-transformers/tests --stand-ins -k "not hub" -x
    python -m tools.outer_tests --tables --write

The tests are read where they are, in a checkout of the project whose version is installed; nothing is copied. pytest
runs in the folder above the `tests` that the first path lies in, as those projects do, without network for the hub.
Arguments that are no paths go to pytest. Exit status 1 if a test fails only with fused models (docs/outer_tests.md).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tools.outer_tests import common_cases, report, stand_ins

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def folder_of(path: Path) -> Path:
    """Where pytest is to run: the folder that holds the outermost `tests` above a path, else the path's own."""
    above = [one.parent for one in (path, *path.parents) if one.name == "tests"]
    return above[-1] if above else path if path.is_dir() else path.parent


def run(
    where: Path, paths: list[Path], arguments: list[str], variables: dict[str, str], *, patched: bool
) -> dict[str, Any]:
    """What `plugin` reports of one run.

    where: the folder in which pytest runs. variables: of the environment, beside `OFFLINE`.

    Raises:
        SystemExit: pytest ended without a report.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider",
            "-p", "tools.outer_tests.plugin", f"--outer-report={found}",
            *(["--outer-patched"] if patched else []), *map(str, paths), *arguments,
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        environment = os.environ | OFFLINE | variables | {"PYTHONPATH": path}
        done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
        if not found.exists():
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}\npytest ended without a report")
        made: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
        return made


def compare(untouched: dict[str, str], fused: dict[str, str]) -> tuple[list[str], list[str]]:
    """Tests that fail only with fused models, and those that fail only without."""
    tests = sorted(untouched.keys() | fused.keys())
    worse = [one for one in tests if fused.get(one, "failed") == "failed" != untouched.get(one)]
    better = [one for one in tests if untouched.get(one, "failed") == "failed" != fused.get(one)]
    return worse, better


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.outer_tests", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders of tests in a checkout")
    parser.add_argument(
        "--stand-ins", action="store_true", help="small random models under the names that tests load from the hub"
    )
    parser.add_argument(
        "--common", default="", metavar="PREFIX,...", help="transformers' common tests of these families, from a folder"
    )
    parser.add_argument("--record", metavar="PROJECT", help="store the run, of a project's tests of this version")
    parser.add_argument("--tables", action="store_true", help="print what is stored, and run nothing")
    parser.add_argument("--write", action="store_true", help="with --tables: bring the page up to date")
    options, others = parser.parse_known_args(arguments)
    if options.tables:
        report.show(write=options.write)
        return 0
    if not options.paths:
        parser.error("paths: expected files or folders of tests")
    for path in options.paths:
        if not path.exists():
            parser.error(f"paths: there is no {path}")
    paths = [path.resolve() for path in options.paths]
    with tempfile.TemporaryDirectory() as folder:
        variables = {}
        if options.stand_ins:
            stand_ins.make(Path(folder))
            variables = stand_ins.environment(Path(folder))
        families = [prefix for prefix in options.common.split(",") if prefix]
        tests, where = common_cases.write(Path(folder), families) or paths, folder_of(paths[0])
        found = {name: run(where, tests, others, variables, patched=name == "fused") for name in ("untouched", "fused")}
    worse, better = compare(found["untouched"]["outcomes"], found["fused"]["outcomes"])
    _print(found, worse, better)
    if not found["untouched"]["outcomes"]:
        print("no test was found")
        return 1
    if options.record is not None:
        shown = [str(path.relative_to(where)) for path in paths]
        stood_in = ["--stand-ins"] if options.stand_ins else []
        common = [f"--common={options.common}"] if options.common else []
        report.store(options.record, shown, [*stood_in, *common, *others], found, worse, better)
    return 1 if worse else 0


def _print(found: dict[str, dict[str, Any]], worse: list[str], better: list[str]) -> None:
    """The runs side by side, why calls were not packed, and the tests that differ."""
    print(f"{'':<10} {'run':>6} {'passed':>7} {'failed':>7} {'skipped':>8} {'packed calls':>13} {'other calls':>12}")
    for name, one in found.items():
        counts, calls = Counter(one["outcomes"].values()), one["calls"]
        numbers = [counts[outcome] for outcome in report.OUTCOMES]
        shown = "".join(f" {number:>{width}}" for number, width in zip(numbers, (7, 7, 8), strict=True))
        print(f"{name:<10} {sum(counts.values()):>6}{shown} {calls['packed']:>13} {calls['others']:>12}")
    print(f"tests with packed calls: {len(found['fused']['packed'])}")
    for reason, count in found["fused"]["reasons"].items():
        print(f"not packed: {count:>6} calls: {reason}")
    for error in found["untouched"]["unread"]:
        print(f"not read: {error}")
    for title, tests in (("fails only fused", worse), ("fails only untouched", better)):
        for test in tests:
            print(f"{title}: {test}")


if __name__ == "__main__":
    sys.exit(main())
