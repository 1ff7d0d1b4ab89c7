"""Stored results, read for drawing: the newest of every case, grouped by machine."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gemm_tuning.table import newest
from benchmarks.kit.markdown import facts
from benchmarks.kit.results import read_folder
from benchmarks.registry import CASES, FAMILY_CASES, FUSED_CASES
from benchmarks.tokenizers import stored as tokenizers


@dataclass(frozen=True)
class Row:
    """One case in one mode: what bert_fast took, and how many times as long the others took."""

    family: str
    label: str  # the case without its family
    mode: str
    result: dict[str, Any]
    speedups: dict[str, float]

    @property
    def share(self) -> float | None:
        """Of the ceiling that binds: the larger of the shares of copying and, where operations count, of arithmetic."""
        shares = (self.result["share_of_copy_ceiling"], self.result.get("share_of_matmul_ceiling"))
        return max((share for share in shares if share is not None), default=None)


@dataclass
class Machine:
    """A GPU or a processor with its newest results.

    facts: what to print about it; ceilings and sanitizer: lines of the last run that has any; simple: results that are
        no kernel cases, by case name; tokenizers: likewise, those of `benchmarks/tokenizers`.
    """

    name: str
    facts: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    ceilings: list[dict[str, Any]] = field(default_factory=list)
    sanitizer: list[dict[str, Any]] = field(default_factory=list)
    red: list[dict[str, Any]] = field(default_factory=list)
    simple: dict[str, dict[str, Any]] = field(default_factory=dict)
    products: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tokenizers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def families(self) -> dict[str, list[Row]]:
        """Rows by family, in alphabetical order."""
        found: dict[str, list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: row.family):
            found.setdefault(row.family, []).append(row)
        return found


def in_order(newest: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results by case: those of whole models as the registry has them, then the others as they came."""
    names = [case.name for case in (*CASES, *FUSED_CASES, *FAMILY_CASES)]
    return {name: newest[name] for name in (*filter(newest.__contains__, names), *newest)}


def load(folder: Path) -> list[Machine]:
    """Every machine with results in a folder, GPUs first. A case that its newest check found wrong is `red`, no row."""
    by_machine: dict[str, list[dict[str, Any]]] = {}
    for line in read_folder(folder):
        by_machine.setdefault(line.get("gpu") or f"{line['processor']}, {_threads(line)}", []).append(line)
    machines = [_machine(name, lines) for name, lines in by_machine.items()]
    return sorted(machines, key=lambda machine: ("threads" in machine.facts, machine.name))


def _threads(line: dict[str, Any]) -> str:
    return f"{line['threads']} threads" if "threads" in line else "without a GPU"


def _machine(name: str, lines: list[dict[str, Any]]) -> Machine:
    machine = Machine(name)
    machine.ceilings, machine.sanitizer = _of_one_run(lines, "ceiling"), _of_one_run(lines, "sanitizer")
    checked = {line["case"]: line for line in lines if line.get("kind") == "verify"}
    machine.red = [line for line in checked.values() if not line["ok"]]
    wrong = {line["case"] for line in machine.red}
    timings = {
        (line["case"], line["mode"], line["provider"]): line
        for line in lines
        if line.get("kind") == "timing" and line["case"] not in wrong
    }
    machine.rows = _rows(timings)
    machine.simple = in_order({line["case"]: line for line in lines if line["kind"] == "cpu"})
    machine.products = _products(lines)
    machine.tokenizers = tokenizers.newest(lines)
    used = [*timings.values(), *machine.simple.values()] or lines
    machine.facts = _facts(used)
    return machine


def _of_one_run(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The lines of a kind from the newest run that has any."""
    found = [line for line in lines if line["kind"] == kind]
    return [line for line in found if line.get("run") == found[-1].get("run")]


def _rows(timings: dict[tuple[str, str, str], dict[str, Any]]) -> list[Row]:
    rows = []
    for (case, mode, provider), line in timings.items():
        if provider == "bert_fast":
            others = {
                p: other["bert_fast_speedup"]
                for (c, m, p), other in timings.items()
                if (c, m) == (case, mode)
                and "bert_fast_speedup" in other
                # Of the same run: another may have timed another kernel.
                and other.get("run") == line.get("run")
            }
            label = case.removeprefix(f"kernel/{line['family']}/").replace("/", "  ")
            rows.append(Row(line["family"], label, mode, line, others))
    return rows


def _products(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Of each product the newest line of each contestant that was timed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line.get("kind") == "gemm":
            name = f"{line['what']}  {line['product']} {line['layout']}  {line['m']}x{line['n']}x{line['k']}"
            found.setdefault(name, []).append(line)
    return {name: [line for line in newest(of_one) if "us" in line] for name, of_one in found.items()}


def _facts(lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What the lines say of themselves; several values where they differ."""
    lines = list(lines)
    found = facts(lines, ("driver", "cuda", "hip", "torch", "triton", "transformers", "python", "processor", "threads"))
    commits = {f"{str(line.get('commit'))[:7]}{' (changed)' if line.get('dirty') else ''}" for line in lines}
    dates = sorted(line["time"][:16].replace("T", " ") for line in lines)
    found["commit"] = ", ".join(sorted(commits))
    found["taken"] = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return found
