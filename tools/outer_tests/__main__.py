"""Runs another project's tests twice, on transformers as it is and with every model fused, and compares test by test.

    python -m tools.outer_tests ../transformers/tests/models/roberta
    python -m tools.outer_tests ../sentence-transformers/tests -k "not hub" -x

The tests are read where they are, in a checkout of the project whose version is installed; nothing is copied. pytest
runs in the folder above the `tests` that the first path lies in, as those projects do, without network for the hub.
Arguments that are no paths go to pytest. Exit status 1 if a test fails only with fused models.
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

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_OUTCOMES = ("passed", "failed", "skipped")


def folder_of(path: Path) -> Path:
    """Where pytest is to run: the folder that holds the outermost `tests` above a path, else the path's own."""
    above = [one.parent for one in (path, *path.parents) if one.name == "tests"]
    return above[-1] if above else path if path.is_dir() else path.parent


def run(paths: list[Path], arguments: list[str], *, patched: bool) -> dict[str, Any]:
    """{"outcomes": {test: outcome}, "calls": {"packed": n, "others": n}} of one run.

    Raises:
        SystemExit: pytest ended without a report.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider",
            "-p", "tools.outer_tests.plugin", f"--outer-report={report}",
            *(["--outer-patched"] if patched else []), *map(str, paths), *arguments,
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        environment = os.environ | OFFLINE | {"PYTHONPATH": path}
        done = subprocess.run(command, cwd=folder_of(paths[0]), env=environment, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}\npytest ended without a report")
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


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
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders of tests in a checkout")
    options, others = parser.parse_known_args(arguments)
    for path in options.paths:
        if not path.exists():
            parser.error(f"paths: there is no {path}")
    paths = [path.resolve() for path in options.paths]
    found = {name: run(paths, others, patched=name == "fused") for name in ("untouched", "fused")}
    print(f"{'':<10} {'run':>6} {'passed':>7} {'failed':>7} {'skipped':>8} {'packed calls':>13} {'other calls':>12}")
    for name, one in found.items():
        counts, calls = Counter(one["outcomes"].values()), one["calls"]
        numbers = [counts[outcome] for outcome in _OUTCOMES]
        shown = "".join(f" {number:>{width}}" for number, width in zip(numbers, (7, 7, 8), strict=True))
        print(f"{name:<10} {sum(counts.values()):>6}{shown} {calls['packed']:>13} {calls['others']:>12}")
    worse, better = compare(found["untouched"]["outcomes"], found["fused"]["outcomes"])
    for title, tests in (("fails only fused", worse), ("fails only untouched", better)):
        for test in tests:
            print(f"{title}: {test}")
    if not found["untouched"]["outcomes"]:
        print("no test was found")
        return 1
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
