"""What a smoke run says: a few lines for each case as it comes, kernels in a table, in the last line what is red."""

from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]
GOOD = ("green", "skipped")


def environment_line(environment: Line) -> str:
    """All that the figures depend on."""
    names = ("gpu", "capability", "driver", "cuda", "torch", "triton", "ptxas", "python", "commit")
    text = ", ".join(f"{name} {environment[name]}" for name in names if environment.get(name))
    return text + (" with changes" if environment.get("dirty") else "")


def case_text(line: Line) -> str:
    """A case: what became of it, times, errors of its outputs; smoke figures, not results."""
    again = ", again with CUDA_LAUNCH_BLOCKING=1" if line["blocking"] else ""
    text = f"{line['outcome']:7} {line['case'].removeprefix('kernel/')}{again}"
    if line.get("way"):
        text += f"  by {line['way']}"
    for mode, times in (line.get("times") or {}).items():
        text += f"  {mode} {times['us']} us (host {times['host_us']})"
    rows = [text + (f"  {line['seconds']} s" if "seconds" in line else "")]
    if line["error"]:
        rows.append(f"        {line['error']}")
    outputs = line.get("outputs") or ()
    rows += [f"        {_output(one)}" for one in outputs if one["wrong"]]
    fine = ", ".join(f"{one['output']} {one['worst']:.0e} {one['rms']:.0e}" for one in outputs if not one["wrong"])
    return "\n".join([*rows, *([f"        {fine}"] if fine else [])])


def _output(one: Line) -> str:
    first = "" if one["first_bad"] is None else f", the first at {list(one['first_bad'])}"
    text = f"{one['output']}: worst {one['worst']:.1e} of {one['allowed_worst']:.1e}, "
    text += f"rms {one['rms']:.1e} of {one['allowed_rms']:.1e}, {one['bad_share']:.2%} bad{first}"
    return text + (f", {one['not_finite']} not finite" if one["not_finite"] else "")


def kernel_table(lines: Iterable[Line]) -> str:
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
    return "\n".join(rows)


def verdict(lines: Iterable[Line], not_run: Iterable[str], kernels: int) -> str:
    """The last line. kernels: how many were launched."""
    lines, left = list(lines), list(not_run)
    red = list(dict.fromkeys(line["case"] for line in lines if line["outcome"] not in GOOD))
    skipped = list(dict.fromkeys(line["case"] for line in lines if line["outcome"] == "skipped"))
    done = {line["case"] for line in lines} - {*red, *skipped}
    parts = [f"red: {'; '.join(red)}"] if red else []
    parts += [f"not run: {'; '.join(left)}"] if left else []
    parts += [f"skipped: {'; '.join(skipped)}"] if skipped else []
    count = f"{len(done)} cases green, {kernels} kernels launched"
    if red or left:
        return " | ".join([*parts, count])
    return " | ".join([f"all that ran is green: {count}" if skipped else f"all is green: {count}", *parts])
