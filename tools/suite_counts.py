"""Fails where fewer tests ran than are on record, folder by folder; records new numbers.

    .venv/bin/python -m tools.suite_counts compare python     what `make test` does after each of its test runs
    .venv/bin/python -m tools.suite_counts record [--reason "why there are fewer"]

`tests/counts.json` is the record. A folder has two numbers: tests that were collected, and tests that ran, those that
did not skip. The latter is compared only in the environment that the record names, that of CI, as other tests skip
elsewhere. More tests than on record are fine; `record` takes them from the reports of the last runs. Numbers never go
down: what may be missing stands under "fewer", with the reason.
"""

import argparse
import json
import platform
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "test_reports"  # <check>.xml, JUnit's format
RECORD = ROOT / "tests" / "counts.json"
# What such a skip depends on changes from one moment to the next: these tests count as if they had run.
MOMENTARY = ("of memory is free", "a tmpfs cannot be mounted here")
KINDS = ("collected", "ran")


@dataclass
class Folder:
    """Numbers of tests; `whole` is False where a file of the folder was skipped before its tests were collected."""

    collected: int = 0
    ran: int = 0
    whole: bool = True


def environment() -> dict[str, Any]:
    """What decides which tests skip, beside what `make test` installs and builds."""
    import torch

    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": ".".join(map(str, sys.version_info[:2])),
        "avx512": "avx512_vbmi2" in flags,
        "gpu": torch.cuda.is_available(),
        "shared_data": (ROOT.parent / "shared" / "data").is_dir(),
    }


def read_report(path: Path) -> dict[str, Folder]:
    """Counts of a report by the folder of the tests; those of CTest, which knows no folders, under "csrc/tests"."""
    found: dict[str, Folder] = defaultdict(Folder)
    seen = set()
    for case in ElementTree.parse(path).iter("testcase"):
        name = (case.get("classname", ""), case.get("name", ""))
        if name in seen:  # an error after the test is a second entry
            continue
        seen.add(name)
        folder = found[_folder_of(".".join(filter(None, name)))]
        skipped = case.find("skipped")
        if not name[0]:
            folder.whole = False
            continue
        folder.collected += 1
        folder.ran += skipped is None or skipped.get("type") == "pytest.xfail" or _is_momentary(skipped)
    return dict(found)


def _folder_of(name: str) -> str:
    """`tests/ops` of `tests.ops.test_mlp.test_sizes[1.5]`."""
    parts = name.split(".")
    if parts[0] != "tests":
        return "csrc/tests"
    return "tests" if parts[1].startswith("test_") else f"tests/{parts[1]}"


def _is_momentary(skipped: ElementTree.Element) -> bool:
    return any(reason in (skipped.get("message") or "") for reason in MOMENTARY)


def missing(record: dict[str, Any], check: str, found: dict[str, Folder], kind: str) -> dict[str, int]:
    """How many tests each folder lacks of what the record wants; negative where it has more."""
    wanted = record.get(check, {})
    lacks = {}
    for name in sorted(wanted.keys() | found.keys()):
        folder = found.get(name, Folder())
        if folder.whole or kind == "ran":
            allowed = sum(entry["tests"] for entry in record["fewer"] if _is_about(entry, check, name))
            lacks[name] = wanted.get(name, dict.fromkeys(KINDS, 0))[kind] - allowed - getattr(folder, kind)
    return lacks


def _is_about(entry: dict[str, Any], check: str, folder: str) -> bool:
    return (entry["check"], entry["folder"]) == (check, folder)


def compare(check: str) -> int:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    here, there = environment(), record["environment"]
    kinds = ("ran", "collected") if here == there else ("collected",)
    if here != there:
        others = ", ".join(f"{name} {here[name]}, not {value}" for name, value in there.items() if here[name] != value)
        print(f"not the environment of the record ({others}): tests are compared as collected, skipped or not")
    found = read_report(REPORTS / f"{check}.xml")
    lacks = {kind: missing(record, check, found, kind) for kind in kinds}
    missed = 0
    for name in lacks[kinds[0]]:
        kind = max(kinds, key=lambda kind: lacks[kind].get(name, 0))  # the worse of the two
        count = lacks[kind].get(name, 0)
        missed += max(count, 0)
        if count:
            print(f"{name}: {abs(count)} {'fewer' if count > 0 else 'more'} {kind} than on record")
    if missed:
        print('where that is meant: .venv/bin/python -m tools.suite_counts record --reason "..."')
    print(f"{sum(getattr(folder, kinds[0]) for folder in found.values())} {kinds[0]}, {missed} missing")
    return 1 if missed else 0


def record_reports(reason: str | None) -> int:
    """Takes the numbers of all reports that are there into the record."""
    here = environment()
    record = {"environment": here, "fewer": []}
    if RECORD.exists():
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    if record["environment"] != here:
        print(f"the record is that of another environment: {record['environment']}, this is {here}")
        return 1
    for report in sorted(REPORTS.glob("*.xml")):
        check, found = report.stem, read_report(report)
        lacks = {kind: missing(record, check, found, kind) for kind in KINDS}
        for name in lacks["ran"]:
            most = max(lacks[kind].get(name, 0) for kind in KINDS)
            if most > 0:
                if reason is None:
                    print(f"{check}: {name} has {most} fewer than on record: say why, --reason")
                    return 1
                record["fewer"].append({"check": check, "folder": name, "tests": most, "reason": reason})
                continue
            folder, known = found.get(name, Folder()), record.setdefault(check, {}).get(name, dict.fromkeys(KINDS, 0))
            if any(getattr(folder, kind) > known[kind] for kind in KINDS):
                record[check][name] = {kind: max(getattr(folder, kind), known[kind]) for kind in KINDS}
                record["fewer"] = [entry for entry in record["fewer"] if not _is_about(entry, check, name)]
    text = json.dumps(record, indent=1, ensure_ascii=False)
    one_line = re.sub(r'\{\s+("collected": \d+),\s+("ran": \d+)\s+\}', r"{\1, \2}", text)
    RECORD.write_text(one_line + "\n", encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("compare").add_argument("check")
    commands.add_parser("record").add_argument("--reason")
    arguments = parser.parse_args()
    return compare(arguments.check) if arguments.command == "compare" else record_reports(arguments.reason)


if __name__ == "__main__":
    sys.exit(main())
