"""What a run of `make gpu` ends with: parts, one line per case, what is owed, and last what is red.

    python -m benchmarks.gpu.summary FILE        the newest run in a file of results, also one that was cut off

What is red takes at most RED_CHARACTERS, so that the end of a log is enough to see it.
"""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.kit.record import Recorder, read_lines

RED_CHARACTERS = 8000


def summary(recorder: Recorder, parts: Iterable[dict[str, Any]], owed: list[str]) -> str:
    """Text; the results file has everything."""
    parts = list(parts)
    lines = ["-" * 78]
    lines += [f"{p['process']:<36} {p['outcome']:<7} {p['seconds']:6.1f} s of {p['allowed_s']:.0f}" for p in parts]
    lines.append("left out: " + _counted(s["reason"][:60] for s in recorder.of_this_run("skipped")))
    measured = "; ".join(map(shown, recorder.of_this_run("ceiling")))
    lines.append(f"ceilings: {measured or 'not measured'}")
    lines += _cases(recorder.of_this_run("timing"))
    lines += _products(recorder.of_this_run("gemm"))
    lines += [
        shown(line)
        for kind in ("profile", "model", "step", "finetune", "embedding", "run")
        for line in recorder.of_this_run(kind)
    ]
    lines.append(f"owed: {len(owed)}" if owed else "owed: nothing")
    return "\n".join([*lines, *(f"  {kernel}" for kernel in owed), *_red(recorder, parts)])


def _red(recorder: Recorder, parts: Iterable[dict[str, Any]]) -> list[str]:
    """Lines that count what was checked, and name what is red; the last one says whether anything is."""
    tests, checked, tools = (recorder.of_this_run(kind) for kind in ("test", "verify", "sanitizer"))
    counts = [
        "tests: " + _counted(t["outcome"] for t in tests),
        "sanitizer: " + _counted(s["outcome"] for s in tools),
        "cases: " + _counted("green" if c["ok"] else "red" for c in checked),
    ]
    red = [f"red: {c['case']}: {str(c['error'])[:200]}" for c in checked if not c["ok"]]
    red += [f"{t['outcome']}: {t['test']}" for t in tests if t["outcome"] not in {"passed", "skipped"}]
    red += [
        f"{s['tool']}: {s['outcome']}: {s['said'][:200]}" for s in tools if s["outcome"] not in {"passed", "skipped"}
    ]
    red += [
        f"{p['process']}: {p['outcome']}" + (f" in {p['case']}" if "case" in p else "")
        for p in parts
        if p["outcome"] != "ok"
    ]
    shown: list[str] = []
    for line in red:
        if sum(map(len, shown)) + len(line) > RED_CHARACTERS:
            break
        shown.append(f"  {line}")
    verdict = f"red: {len(red)}, {len(red) - len(shown)} of them not shown" if red else "nothing is red"
    return [*counts, *shown, verdict]


def shown(line: dict[str, Any]) -> str:
    """One stored result in a line of the terminal."""
    return _SHOWN[line["kind"]](line)


def _checked(line: dict[str, Any]) -> str:
    return f"{line['case']}: {'green' if line['ok'] else 'RED ' + line['error']}"


def _compiled(line: dict[str, Any]) -> str:
    return f"{line['case']}: " + (line["error"] or f"compiled in {line['seconds']} s")


def _ceiling(line: dict[str, Any]) -> str:
    if "gb_s" in line:
        return f"copy of {line['bytes'] / 1e6:.0f} MB {line['gb_s']:.0f} GB/s"
    return f"{line['what']} {line['tflop_s']:.0f} TFLOP/s"


def _timing(line: dict[str, Any]) -> str:
    share = line["share_of_copy_ceiling"]
    text = f"{line['case']} {line['mode']:4} {line['provider']:9} {line['us']:9.1f} us {line['gb_s']:7.1f} GB/s"
    text += f" ({share:.0%} of copy)" if share else ""
    text += f", {line['tflop_s']:6.1f} TFLOP/s" if "tflop_s" in line else ""
    return text + (f", bert_fast {line['bert_fast_speedup']}x" if "bert_fast_speedup" in line else "")


def _product(line: dict[str, Any]) -> str:
    product = " ".join(str(line[name]) for name in ("what", "product", "layout", "m", "n", "k", "dtype"))
    rate = f"{line['us']:9.1f} us {line['tflop_s']:6.1f} TFLOP/s" if "us" in line else line["error"]
    return f"{product:52} {line['candidate']:40} {rate}"


def _tile(line: dict[str, Any]) -> str:
    group = f"{line['what']} S{line['length']} p{line['dropout_p']}"
    return f"{group:24} {line['candidate']:28} {line.get('us', line.get('error'))}"


def _model(line: dict[str, Any]) -> str:
    rate = f"{line['bert_fast_tokens_per_s']:>12,.0f} real tokens/s"
    return f"{line['case']:<55} {rate}  transformers {line['ratio']:.2f}x"


def _step(line: dict[str, Any]) -> str:
    text = f"{line['case'].removeprefix('step/'):<40} {line['provider']:9} {line['ms']:9.2f} ms{_steady(line)}"
    text += f" {line['sequences_per_s']:9,.1f} sequences/s{_mfu(line)}"
    return text + ("" if line["provider"] == "bert_fast" else f"  bert_fast {line['bert_fast_speedup']}x")


def _steady(line: dict[str, Any]) -> str:
    return f" ({line['ms_steady']:.2f} without waiting)" if "ms_steady" in line else ""


def _profile(line: dict[str, Any]) -> str:
    text = (
        f"{line['case']:<40} {line['provider']:9} {line['ms']:9.2f} ms{_steady(line)}, device {line['gpu_ms']:.2f} ms"
    )
    busy = "" if line["busy_share"] is None else f", busy {line['busy_share']:.1%}"
    return f"{text}, {line['launches']:.0f} launches{busy}"


def _embedding(line: dict[str, Any]) -> str:
    text = f"{line['case'].removeprefix('embedding/'):<40} {line['provider']:9} {line['ms']:9.2f} ms"
    text += f" {line['texts_per_s']:9,.1f} texts/s {line['real_tokens_per_s']:12,.0f} tokens/s"
    return text + ("" if line["provider"] == "bert_fast" else f"  bert_fast {line['bert_fast_speedup']}x")


def _run(line: dict[str, Any]) -> str:
    text = f"{line['case'].removeprefix('run/'):<40} {line['tokens_per_s']:>12,.0f} tokens/s"
    return f"{text}{_mfu(line)}  waits {line['wait_share']:.1%}"


def _mfu(line: dict[str, Any]) -> str:
    return f"  MFU {line['mfu']:.0%}" if line["mfu"] is not None else ""


_SHOWN: dict[str, Callable[[dict[str, Any]], str]] = {
    "verify": _checked, "compile": _compiled, "ceiling": _ceiling, "timing": _timing, "gemm": _product, "tiles": _tile,
    "model": _model, "step": _step, "finetune": _step, "profile": _profile, "embedding": _embedding, "run": _run,
}  # fmt: skip


def _counted(words: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common()) or "none"


def _products(lines: list[dict[str, Any]]) -> list[str]:
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


def _cases(timings: list[dict[str, Any]]) -> list[str]:
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
    runs = [line["run"] for line in read_lines(path) if line.get("kind") != "smoke"] if path.is_file() else []
    if not runs:
        parser.error(f"{path}: expected a file with the lines of a run")
    recorder = Recorder(path, {"run": runs[-1]})
    text = summary(recorder, recorder.of_this_run("part"), [])
    print(text)
    return 0 if text.endswith("nothing is red") else 1


if __name__ == "__main__":
    sys.exit(main())
