"""What the witness ran: kernels with the source they had, cases with their errors; as JSON and as Markdown.

A record belongs to a processor, and one to the oldest Triton that is supported. Reading it needs no package.
"""

import json
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.aot import table
from benchmarks.kit.programs import kernel_digests

if TYPE_CHECKING:  # bert_fast is imported later, with a GPU's answers
    from bert_fast.testing.compare import Comparison

RECORD_PATH = Path(__file__).parent / "record.json"
_COLUMNS = ("kernels", "programs", "output", "worst", "rms", "share", "seconds")


def name_of(device: str, triton_version: str) -> str:
    """Of a run's record: "sm_90", "sm_80", "sm_90 oldest"."""
    return f"{device} oldest" if triton_version == table.read(table.OLDEST_PATH)["triton"] else device


def figures(found: "Sequence[Comparison]") -> dict[str, Any]:
    """Of a case's outputs the one that comes closest to what is allowed: its errors, and their share of that."""
    if not found:
        return {"output": None, "worst": None, "rms": None, "share": None}
    most = max(found, key=_share)
    return {
        "output": f"{most.output} {most.dtype}",
        "worst": float(f"{most.worst:.3g}"),
        "rms": float(f"{most.rms:.3g}"),
        "share": round(_share(most), 2),
    }


def _share(one: "Comparison") -> float:
    pairs = ((one.worst, one.allowed_worst), (one.rms, one.allowed_rms))
    return max(error / allowed if allowed else float(error > 0.0) for error, allowed in pairs)


def read() -> dict[str, Any]:
    """{name: {"triton": version, "kernels": {kernel: digest}, "cases": {case: {column: value}}}}."""
    runs = json.loads(RECORD_PATH.read_text()) if RECORD_PATH.exists() else {}
    for run in runs.values():
        run["cases"] = {name: dict(zip(_COLUMNS, row, strict=True)) for name, row in run["cases"].items()}
    return runs


def up_to_date(device: str, triton_version: str) -> set[str]:
    """Names of the cases whose kernels all have the sources that the record says, by this Triton."""
    run = read().get(name_of(device, triton_version))
    if run is None or run["triton"] != triton_version:
        return set()
    current = kernel_digests()
    same = {kernel for kernel, source in run["kernels"].items() if current.get(kernel) == source}
    return {f"kernel/{name}" for name, case in run["cases"].items() if same.issuperset(case["kernels"])}


def write(device: str, triton_version: str, lines: Sequence[dict[str, Any]], known: Set[str] = frozenset()) -> None:
    """Puts what a run found right into the record, in the place of all but the `known` cases."""
    right = [line for line in lines if line["ok"]]
    kernels = {name: source for line in right for name, source in line["kernels"].items()}
    cases = {line["case"].removeprefix("kernel/"): {c: line[c] for c in _COLUMNS} for line in right}
    for case in cases.values():
        case["kernels"] = sorted(case["kernels"])
    if known:
        old = read()[name_of(device, triton_version)]
        kept = {name: case for name, case in old["cases"].items() if f"kernel/{name}" in known}
        kernels |= {kernel: old["kernels"][kernel] for case in kept.values() for kernel in case["kernels"]}
        cases = {name: (kept | cases)[name] for name in dict.fromkeys([*old["cases"], *cases]) if name in kept | cases}
    run = {"triton": triton_version, "kernels": dict(sorted(kernels.items())), "cases": cases}
    runs = dict(sorted((read() | {name_of(device, triton_version): run}).items()))
    RECORD_PATH.write_text(_to_json(runs))


def _to_json(runs: dict[str, Any]) -> str:
    """A line for each kernel and each case."""
    parts = []
    for name, run in runs.items():
        kernels = [f"   {json.dumps(kernel)}: {json.dumps(source)}" for kernel, source in run["kernels"].items()]
        cases = [f"   {json.dumps(case)}: {json.dumps(list(row.values()))}" for case, row in run["cases"].items()]
        parts.append(
            f" {json.dumps(name)}: {{\n"
            f'  "triton": {json.dumps(run["triton"])},\n'
            '  "kernels": {\n' + ",\n".join(kernels) + "\n  },\n"
            '  "cases": {\n' + ",\n".join(cases) + "\n  }\n }"
        )
    return "{\n" + ",\n".join(parts) + "\n}\n"


def markdown(runs: dict[str, Any]) -> str:
    """A section for each run with a table of its cases, then a table of how many cases ran each kernel."""
    lines = []
    for name, run in runs.items():
        cases = run["cases"]
        programs, seconds = (sum(case[column] for case in cases.values()) for column in ("programs", "seconds"))
        lines += [
            f"### {name.split(' ')[0]}, Triton {run['triton']}",
            f"{len(run['kernels'])} kernels, {len(cases)} cases, {programs:,} programs, {seconds:.0f} s.",
            "",
            "| case | kernels | programs | output | worst | rms | share | seconds |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for text, case in cases.items():
            errors = [case["output"] or "", *(_number(case[column]) for column in ("worst", "rms", "share"))]
            cells = [text, str(len(case["kernels"])), f"{case['programs']:,}", *errors, f"{case['seconds']:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += ["### Cases of each kernel", "", f"| kernel | {' | '.join(runs)} |", "| --- |" + " --- |" * len(runs)]
    for kernel in sorted({kernel for run in runs.values() for kernel in run["kernels"]}):
        counts = [str(sum(kernel in case["kernels"] for case in run["cases"].values())) for run in runs.values()]
        lines.append(f"| `{kernel}` | {' | '.join(counts)} |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
