"""Stored runs of other projects' tests, one JSON line each, and the tables of docs/outer_tests.md.

A line: project and version of the tests, paths and options of the run, versions of what was installed; for both runs
how many tests passed, failed and were skipped; calls of the fused run by path; reasons; names of the tests that differ.
The newest line of a project, its paths, installed versions and families that an option names counts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.kit.markdown import NOTHING, show_tables, table
from benchmarks.kit.results import ROOT, Recorder, host_environment, read_lines

RECORD = ROOT / "tests" / "outer_tests.jsonl"
PAGE = ROOT / "docs" / "outer_tests.md"
OUTCOMES = ("passed", "failed", "skipped")
# Parts of names of tests that fail on one side, now and then or always, and no fault of ours -> why.
EXPLAINED = {
    "test_no_duplicates_batch_sampler_matches_reference_algorithm": "has no model and shuffles data without a seed; "
    "untouched it failed in 9 of 32 runs",
    "test_training_gradient_checkpointing_use_reentrant": "compares which gradients are exactly 0 in two steps. "
    "That of the bias of a head of multiple choice is 0 but for rounding, and the test puts a mock in the place of a "
    "layer's forward before the second step, which so runs by transformers' code, with other rounding and dropout",
}


def store(
    project: str,
    paths: list[str],
    options: list[str],
    found: Mapping[str, Mapping[str, Any]],
    worse: list[str],
    better: list[str],
    path: Path | None = None,
) -> None:
    """Appends a run to the record."""
    fused = found["fused"]
    counts = {name: Counter(one["outcomes"].values()) for name, one in found.items()}
    Recorder(RECORD if path is None else path, host_environment()).write(
        "outer_tests",
        project=project,
        installed=fused["versions"],
        paths=paths,
        options=options,
        **{name: {outcome: counts[name][outcome] for outcome in OUTCOMES} for name in found},
        packed_calls=fused["calls"]["packed"],
        other_calls=fused["calls"]["others"],
        packed_tests=len(fused["packed"]),
        reasons=fused["reasons"],
        fails_only_fused=worse,
        fails_only_untouched=better,
    )


def lines(path: Path | None = None) -> list[dict[str, Any]]:
    """The newest line of every run, in the order of the first ones."""
    newest: dict[str, dict[str, Any]] = {}
    path = RECORD if path is None else path
    for line in read_lines(path) if path.exists() else ():
        families = [option for option in line["options"] if option.startswith(("--outer-instead=", "--common="))]
        newest[f"{line['project']} {_installed(line)} {line['paths']} {families}"] = line
    return list(newest.values())


def tables(path: Path | None = None) -> dict[str, str]:
    """What stands between the marks of the page."""
    stored = lines(path)
    if not stored:
        return dict.fromkeys(("runs", "reasons", "differences"), NOTHING)
    header = ["tests of", "installed", "tests", "untouched", "fused", "fail only fused", "packed calls", "other calls"]
    return {
        "runs": table(header, map(_row, stored)),
        "reasons": table(["reason", "calls"], _reasons(stored)),
        "differences": table(["tests of", "installed", "test", "fails only", "why"], _differences(stored)),
    }


def show(*, write: bool) -> None:
    """Prints the tables; with `write` the page gets them."""
    show_tables(tables(), PAGE, write)


def _why(test: str) -> str:
    return next((why for part, why in EXPLAINED.items() if part in test), "not known")


def _row(line: Mapping[str, Any]) -> list[str]:
    def shown(name: str) -> str:
        return ", ".join(f"{line[name][outcome]} {outcome}" for outcome in OUTCOMES if line[name][outcome])

    return [
        line["project"],
        _installed(line),
        " ".join(f"`{path}`" for path in line["paths"]) + ("" if not line["options"] else f" `{_options(line)}`"),
        shown("untouched"),
        shown("fused"),
        str(len(line["fails_only_fused"])),
        f"{line['packed_calls']} in {line['packed_tests']} tests",
        str(line["other_calls"]),
    ]


def _installed(line: Mapping[str, Any]) -> str:
    project = line["project"].split()[0]
    shown = {name.replace("_", "-"): version for name, version in line["installed"].items()}
    return ", ".join(f"{name} {shown[name]}" for name in dict.fromkeys((project, "transformers")) if name in shown)


def _options(line: Mapping[str, Any]) -> str:
    return " ".join(f"'{one}'" if " " in one else one for one in line["options"])


def _reasons(stored: Iterable[Mapping[str, Any]]) -> Iterable[list[str]]:
    calls: Counter[str] = Counter()
    for line in stored:
        calls.update(line["reasons"])
    return [[reason.replace("|", "/"), str(count)] for reason, count in calls.most_common()]


def _differences(stored: Iterable[Mapping[str, Any]]) -> Iterable[list[str]]:
    return [
        [line["project"], _installed(line), f"`{test}`", side, _why(test)]
        for line in stored
        for side in ("fused", "untouched")
        for test in line[f"fails_only_{side}"]
    ]
