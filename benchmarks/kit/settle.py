"""Leaves of a GPU's stored results what counts, and says once what all lines of a run share.

    python -m benchmarks.kit.settle [FOLDER]

`make results` does so first. Of each case the newest line of every contestant counts, and with it all lines of that
case from the same run, since a ratio is of rounds in turn. Of a matrix product the library and the fastest tile are
left. What led to a green check is dropped, and tests that were skipped. Older results are in the history of the file.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gemm_tuning.table import best
from benchmarks.kit.record import RESULTS, read_lines

Line = dict[str, Any]
# What a line is a result of; which of the fields it has depends on its kind.
_CASE = (
    "kind", "family", "case", "test", "tool", "what", "product", "layout", "dtype", "m", "n", "k", "length",
    "dropout_p", "mode", "model",
)  # fmt: skip
_CONTESTANT = ("provider", "candidate")
# Of a run that is over: what was left out of it, and how its parts ended.
_OF_RUNS = ("part", "skipped")
_TRACES = ("outputs", "compiled", "message")  # of a check: worth a look where it is red


def settled(lines: Iterable[Line]) -> list[Line]:
    """The lines of one GPU that count, in their order."""
    lines = list(lines)
    newest = {(_named(line, _case_of(line)), _named(line, _CONTESTANT)): line["run"] for line in lines}
    runs: dict[tuple[Any, ...], set[str]] = {}
    for (case, _), run in newest.items():
        runs.setdefault(case, set()).add(run)
    kept = [line for line in lines if line["run"] in runs[_named(line, _case_of(line))] and not _is_skipped(line)]
    fastest = {id(line) for of_one in _products(kept) for line in best(of_one) if line is not None}
    return [_without_traces(line) for line in kept if line["kind"] != "gemm" or id(line) in fastest]


def _case_of(line: Line) -> tuple[str, ...]:
    return ("kind", "part") if line["kind"] in _OF_RUNS else _CASE


def _is_skipped(line: Line) -> bool:
    return line["kind"] == "test" and line["outcome"] == "skipped"


def _named(line: Line, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in names)


def _products(lines: list[Line]) -> Iterable[list[Line]]:
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        if line["kind"] == "gemm":
            found.setdefault(_named(line, _CASE), []).append(line)
    return found.values()


def _without_traces(line: Line) -> Line:
    is_green = line.get("outcome") in ("green", "passed")
    return {name: value for name, value in line.items() if not (is_green and name in _TRACES)}


def shared(lines: list[Line]) -> Iterator[Line]:
    """The same for a file: before a run's lines one of kind "run" with its name, its end and what they share.

    Of kind "tests" there is one for all that passed.
    """
    of_run: dict[str, list[Line]] = {}
    for line in lines:
        of_run.setdefault(line["run"], []).append(line)
    for run, those in of_run.items():
        same = {
            name: value
            for name, value in those[0].items()
            if name != "kind" and all(name in line and line[name] == value for line in those)
        } | {"run": run, "time": max(line["time"] for line in those)}
        yield {"run": run, "kind": "run"} | same
        passed = []
        for line in those:
            if line["kind"] == "test" and line["outcome"] == "passed":
                passed.append(line)
            else:
                yield {name: line[name] for name in line if name not in same}
        if passed:
            yield {"kind": "tests", "outcome": "passed", "tests": _by_file(passed)}


def _by_file(tests: Iterable[Line]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in tests:
        file, name = line["test"].split("::", 1)
        found.setdefault(file, []).append(name)
    return found


def settle(path: Path) -> None:
    """Replaces a GPU's file of results, in one step; leaves another file as it is."""
    lines = list(read_lines(path))
    if lines and all(line.get("gpu") for line in lines):
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(f"{json.dumps(line)}\n" for line in shared(settled(lines))), encoding="utf-8")
        temporary.replace(path)


def main(folder: str | None = None) -> None:
    """Settles every file of a folder, benchmarks/results by default."""
    for path in sorted(Path(folder or RESULTS).glob("*.jsonl")):
        settle(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
