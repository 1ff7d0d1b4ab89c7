"""What a run ends with: parts, one line per case, kernels as compiled, what is owed, and last what is red.

    python -m benchmarks.gpu.summary FILE        the newest run in a file of results, also one that was cut off

What is red takes at most RED_CHARACTERS, so that the end of a log is enough to see it.
"""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.driver import GOOD
from benchmarks.kit.results import Recorder, read_lines

Line = dict[str, Any]
RED_CHARACTERS = 8000


def summary(recorder: Recorder, parts: Iterable[Line], owed: Sequence[str] | None = None) -> str:
    """Text; the results file has everything. owed: kernels that no GPU result is of; None says nothing of them."""
    parts, of = list(parts), recorder.of_this_run
    lines = ["-" * 78]
    lines += [f"{p['process']:<36} {p['outcome']:<7} {p['seconds']:6.1f} s of {p['allowed_s']:.0f}" for p in parts]
    if left_out := of("skipped"):
        lines.append("left out: " + _counted(line["reason"][:60] for line in left_out))
    if measured := of("ceiling"):
        lines.append("ceilings: " + "; ".join(map(shown, measured)))
    lines += _cases(of("timing"))
    lines += _products(of("gemm"))
    for kind in ("profile", "step", "finetune", "embedding", "run"):
        lines += map(shown, of(kind))
    lines += _kernels(of("smoke"))
    if owed is not None:
        lines += [f"owed: {len(owed)}" if owed else "owed: nothing", *(f"  {kernel}" for kernel in owed)]
    for kind in _CHECKS:
        if checked := of(kind):
            launched = {kernel for line in checked for kernel in line.get("kernels") or ()}
            lines.append(f"{kind}: {_counted(map(_outcome, checked))}; {len(launched)} kernels launched")
    return "\n".join([*lines, *_verdict(red(recorder, parts))])


# What compares: the kind of its lines, and what a line is named by.
_CHECKS = {"test": "test", "sanitizer": "tool", "verify": "case", "smoke": "case"}
_FINE = ("green", "passed", "skipped")


def _outcome(line: Line) -> str:
    return str(line["outcome"]) if "outcome" in line else "green" if line["ok"] else "red"


def red(recorder: Recorder, parts: Iterable[Line]) -> list[str]:
    """A line for all that is red or was not run."""
    found = []
    for kind, name in _CHECKS.items():
        for line in recorder.of_this_run(kind):
            if _outcome(line) not in _FINE:
                why = " ".join(str(line.get("error") or line.get("said") or "").split())
                why = why if len(why) <= 200 else f"{why[:100]} ... {why[-100:]}"  # a process' last words come last
                found.append(f"{_outcome(line)}: {line[name]}" + (f": {why}" if why else ""))
    for line in parts:
        if line["outcome"] not in GOOD:
            found.append(f"{line['process']}: {line['outcome']}" + (f" in {line['case']}" if "case" in line else ""))
    return found


def _verdict(red: Sequence[str]) -> list[str]:
    """What is red, as far as RED_CHARACTERS go; the last line says whether anything is."""
    shown: list[str] = []
    for line in red:
        if sum(map(len, shown)) + len(line) > RED_CHARACTERS:
            break
        shown.append(f"  {line}")
    return [*shown, f"red: {len(red)}, {len(red) - len(shown)} of them not shown" if red else "nothing is red"]


# What a line is named by, and what is shown of it; which of them it has depends on its kind.
_NAMES = (
    "case", "what", "product", "layout", "m", "n", "k", "dtype", "length", "dropout_p", "mode", "provider", "candidate",
)  # fmt: skip
_FIGURES = (
    "outcome", "ok", "error", "us", "gb_s", "share_of_copy_ceiling", "tflop_s", "ms", "ms_steady", "host_ms", "gpu_ms",
    "launches", "busy_share", "sequences_per_s", "texts_per_s", "real_tokens_per_s", "tokens_per_s", "mfu",
    "wait_share", "bert_fast_speedup", "speedup_over_library", "way", "differ_without", "times", "seconds",
)  # fmt: skip


def shown(line: Line) -> str:
    """One stored result for the terminal; of a smoke case also the errors of its outputs."""
    name = " ".join(_text(line[key]) for key in _NAMES if key in line)
    name += ", again with CUDA_LAUNCH_BLOCKING=1" if line.get("blocking") else ""
    rows = [f"{name}: " + ", ".join(f"{key} {_text(line[key])}" for key in _FIGURES if line.get(key) is not None)]
    outputs = line.get("outputs") or ()
    rows += [f"    {_output(one)}" for one in outputs if one["wrong"]]
    fine = ", ".join(f"{one['output']} {one['worst']:.0e} {one['rms']:.0e}" for one in outputs if not one["wrong"])
    return "\n".join([*rows, *([f"    {fine}"] if fine else [])])


def _text(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else str(value)


def _output(one: Line) -> str:
    first = "" if one["first_bad"] is None else f", the first at {list(one['first_bad'])}"
    text = f"{one['output']}: worst {one['worst']:.1e} of {one['allowed_worst']:.1e}, "
    text += f"rms {one['rms']:.1e} of {one['allowed_rms']:.1e}, {one['bad_share']:.2%} bad{first}"
    return text + (f", {one['not_finite']} not finite" if one["not_finite"] else "")


def _counted(words: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common()) or "none"


def _kernels(lines: Iterable[Line]) -> list[str]:
    """A row for each kernel: seconds of all its compilations, the most registers, spills and shared memory."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        for one in line.get("compiled") or ():
            found.setdefault(one["kernel"], []).append(one)
    rows = [f"{'kernel':40}{'compiled':>9}{'s':>7}{'registers':>10}{'spills B':>9}{'shared B':>9}"]
    for kernel, ones in sorted(found.items()):
        most = [max(one[name] or 0 for one in ones) for name in ("registers", "spill_bytes", "shared_bytes")]
        seconds = sum(one["compile_s"] for one in ones)
        rows.append(f"{kernel:40}{len(ones):>9}{seconds:>7.1f}{most[0]:>10}{most[1]:>9}{most[2]:>9}")
    return rows if found else []


def _products(lines: list[Line]) -> list[str]:
    """Matrix products: how many, and our fastest tile beside the library; what failed, once for each message."""
    ours: dict[str, float] = {}
    for line in lines:
        if line["tile"] is not None and "us" in line:
            product = " ".join(str(line[name]) for name in ("product", "layout", "m", "n", "k"))
            ours[product] = max(ours.get(product, 0.0), line["speedup_over_library"])
    if not lines:
        return []
    shown = f"matrix products: {len(ours)} with a tile of ours"
    if ours:
        faster = sum(speedup > 1 for speedup in ours.values())
        shown += f", {statistics.median(ours.values()):.2f}x the library (median), {faster} faster"
    failed = Counter(line["error"][:100] for line in lines if "error" in line)
    return [shown, *(f"  {count} tiles: {error}" for error, count in failed.most_common(10))]


def _cases(timings: list[Line]) -> list[str]:
    """us, share of the copy ceiling, TFLOP/s where counted, and how many times as fast as each of the others; families
    one after the other, which are timed in turn.
    """
    timings = sorted(timings, key=lambda line: line["family"])
    rows: dict[tuple[str, str], str] = {}
    for line in timings:
        key = line["case"], line["mode"]
        if line["provider"] == "bert_fast" and key not in rows:  # timed a second time beside its peers
            share = line["share_of_copy_ceiling"]
            shown = f"{share:4.0%}" if share is not None else "    "
            if "tflop_s" in line:
                shown += f" {line['tflop_s']:6.1f} TFLOP/s"
            rows[key] = f"{key[0].removeprefix('kernel/'):<50} {key[1]:4} {line['us']:9.1f} us {shown}"
    for line in timings:
        key = line["case"], line["mode"]
        if "bert_fast_speedup" in line and key in rows:
            rows[key] += f"  {line['provider']} {line['bert_fast_speedup']:.2f}x"
    return list(rows.values())


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if something is red."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.summary", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="of results: FOLDER/<gpu>.jsonl")
    path = parser.parse_args(arguments).file
    runs = [line["run"] for line in read_lines(path)] if path.is_file() else []
    if not runs:
        parser.error(f"{path}: expected a file with the lines of a run")
    recorder = Recorder(path, {"run": runs[-1]})
    parts = recorder.of_this_run("part")
    print(summary(recorder, parts))
    return 1 if red(recorder, parts) else 0


if __name__ == "__main__":
    sys.exit(main())
