"""Leaves of stored results what counts, and says once what several lines share.

    python -m benchmarks.kit.settle [FOLDER]

`make results` does so first. Of each case the newest line of every contestant counts, on each machine, and with it all
lines of that case from the same run, since a ratio is of rounds in turn. Of a matrix product the library and the
fastest tile are left. What led to a green check is dropped, and so is what no page shows: tests that were skipped, what
a run left out. Older results are in the history of the file.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gemm_tuning.table import best
from benchmarks.kit.folding import CASE, CONTESTANT, Line, folded, unfolded
from benchmarks.kit.results import RESULTS, read_lines

# Fields that no page shows. Of a check, they are worth a look where it is red.
_OF_GREEN = {"outputs", "compiled", "message", "times", "kernels", "seconds"}
_UNUSED = {
    "finetune": {"gpu_share", "model_tflop_s", "real_tokens_per_s"},
    "gemm": {"us_p20", "us_p80", "tflop_s"},
    "profile": {"gaps"},
    "step": {"gpu_share", "model_tflop_s", "real_tokens_per_s"},
    "timing": {"peers", "rotation", "equal_copy_gb_s", "copy_ceiling_gb_s", "matmul_ceiling_tflop_s"},
    "verify": {"seconds"},
}
# Of another contestant than ours: they follow from the times.
_RATES = {"gb_s", "share_of_equal_copy", "share_of_copy_ceiling", "tflop_s", "share_of_matmul_ceiling"}
DIGITS = 7  # of a figure
MESSAGE = 300  # characters of what a test failed with: the last ones


def settled(lines: Iterable[Line]) -> list[Line]:
    """The lines of one file that count, in their order."""
    lines = list(lines)
    newest = {(_case(line), _named(line, CONTESTANT)): _run(line) for line in lines}
    runs: dict[tuple[Any, ...], set[str]] = {}
    for (case, _), run in newest.items():
        runs.setdefault(case, set()).add(run)
    kept = [line for line in lines if _run(line) in runs[_case(line)] and _is_shown(line)]
    fastest = {id(line) for of_one in _products(kept) for line in best(of_one) if line is not None}
    return [_shown(line) for line in kept if line["kind"] != "gemm" or id(line) in fastest]


def _run(line: Line) -> str:
    """The run of a line. A line of a CPU names none and is a run of its own."""
    return str(line.get("run") or line["time"])


def _case(line: Line) -> tuple[Any, ...]:
    """What a line is a result of, and the machine; of a part of a run, which part."""
    machine = line.get("gpu") or (line.get("processor"), line.get("threads"))
    return machine, *_named(line, ("kind", "part") if line["kind"] == "part" else CASE)


def _is_shown(line: Line) -> bool:
    """Whether a page shows lines like this one."""
    if line["kind"] == "part":
        return line["part"] == "tests"
    return line["kind"] != "skipped" and (line["kind"], line.get("outcome")) != ("test", "skipped")


def _named(line: Line, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in names)


def _products(lines: list[Line]) -> Iterable[list[Line]]:
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        if line["kind"] == "gemm":
            found.setdefault(_named(line, CASE), []).append(line)
    return found.values()


def _shown(line: Line) -> Line:
    """A line without the fields that no page shows; of seconds of every round their number."""
    dropped = _UNUSED.get(line["kind"], set())
    if (line["kind"], line.get("outcome")) in (("smoke", "green"), ("test", "passed")):
        dropped = dropped | _OF_GREEN
    if line["kind"] == "timing" and line["provider"] != "bert_fast":
        dropped = dropped | _RATES
    if isinstance(line.get("transformers_s"), list):
        dropped = dropped | {"bert_fast_s", "transformers_s"}
        line = line | {"rounds": len(line["transformers_s"])}
    if "message" in line:
        line = line | {"message": line["message"][-MESSAGE:]}
    return {name: _rounded(value) for name, value in line.items() if name not in dropped}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def settle(path: Path) -> None:
    """Replaces a file of results, in one step. SystemExit where it would not be read back as it is."""
    temporary, kept = path.with_suffix(".tmp"), settled(read_lines(path))
    try:
        lines = list(folded(kept))
        is_whole = _untimed(unfolded(lines)) == _untimed(kept)
    except KeyError as missing:  # of a line of a form that no program here writes
        raise SystemExit(f"{path}: lines without {missing} cannot be settled") from None
    if not is_whole:
        raise SystemExit(f"{path}: settled, it would not be read back as it is")
    temporary.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    temporary.replace(path)


def _untimed(lines: Iterable[Line]) -> list[str]:
    """Lines as text, sorted, without their times: those of a run get that of its last line."""
    found = ({name: value for name, value in line.items() if name != "time"} for line in lines)
    return sorted(json.dumps(line, sort_keys=True) for line in found)


def main(folder: str | None = None) -> None:
    """Settles every file of a folder, benchmarks/results by default."""
    for path in sorted(Path(folder or RESULTS).glob("*.jsonl")):
        settle(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
