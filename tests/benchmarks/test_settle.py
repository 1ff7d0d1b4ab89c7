"""Settled results say what they said before, in fewer and shorter lines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.results import read_lines
from benchmarks.kit.settle import main, settled

CASE = "step/base/full@128/B256"
KERNEL = "kernel/linear/8x16/bf16/x"
Line = dict[str, Any]


def line(kind: str, run: str, **fields: Any) -> Line:
    return {"run": run, "gpu": "Some GPU", "torch": "2.11", "dirty": False, "kind": kind, "time": f"{run}0"} | fields


def step(run: str, provider: str, ms: float) -> Line:
    return line("step", run, case=CASE, provider=provider, ms=ms)


def product(run: str, candidate: str, speedup: float, n: int = 2) -> Line:
    tile = None if candidate == "library" else {"block_m": len(candidate)}
    named: Line = {"product": "plain", "layout": "nt", "dtype": "bf16", "m": 1, "n": n, "k": 3, "source": "a"}
    return line(
        "gemm", run, **named, candidate=candidate, tile=tile, us=1.0, speedup_over_library=speedup, verified=True,
        kernels={"_gemm_kernel": "d1"},
    )  # fmt: skip


def timing(run: str, provider: str, mode: str, us: float, **fields: Any) -> Line:
    return line(
        "timing", run, family="linear", case=KERNEL, provider=provider, mode=mode, us=us, clock="queue", **fields
    )


def on_cpu(time: str, ms: float, **fields: Any) -> Line:
    return {
        "time": time,
        "commit": "c1",
        "processor": "x86",
        "threads": 2,
        "kind": "cpu",
        "case": "x",
        "ms": ms,
    } | fields


def test_a_contestant_keeps_the_rounds_it_was_timed_in() -> None:
    """What was newest of a contestant stays, with the lines beside it; older ones go."""
    lines = [
        step("1", "bert_fast", 3.0), step("1", "sdpa", 4.0),
        step("2", "bert_fast", 2.0), step("2", "eager", 5.0), step("2", "sdpa", 4.1),
        step("3", "bert_fast", 1.0), step("3", "sdpa", 4.2),
    ]  # fmt: skip
    assert settled(lines) == lines[2:]


def test_of_a_product_the_library_and_the_fastest_tile_stay() -> None:
    lines = [product("1", name, speedup) for name, speedup in (("library", 1.0), ("x", 1.1), ("y", 1.4), ("z", 0.9))]
    assert [one["candidate"] for one in settled(lines)] == ["library", "y"]


def test_a_red_check_keeps_what_led_to_it() -> None:
    green, red = (
        line("smoke", "1", case=name, outcome=outcome, outputs=[1], compiled=[2])
        for name, outcome in (("a", "green"), ("b", "red"))
    )
    assert settled([green, red]) == [line("smoke", "1", case="a", outcome="green"), red]


def test_of_a_processor_the_newest_line_of_each_case_stays() -> None:
    """Another processor, another number of threads and another case have a newest line of their own."""
    old, new = on_cpu("1", 1.0), on_cpu("5", 2.0)
    others = [on_cpu("2", 3.0, processor="arm"), on_cpu("3", 4.0, threads=1), on_cpu("4", 5.0, case="y")]
    assert settled([old, *others, new]) == [*others, new]


def test_what_no_page_shows_is_left_out() -> None:
    ours = timing("1", "bert_fast", "fwd", 1.0, gb_s=2.0, peers=["liger"])
    theirs = timing("1", "eager", "fwd", 2.0, gb_s=1.0, bert_fast_speedup=2.000000001)
    rounds = on_cpu("1", 1.0, bert_fast_s=[1.0, 1.1, 1.2], transformers_s=[2.0, 2.1, 2.2])
    left_out = [line("skipped", "1", part="time", case="a"), line("part", "1", part="time", outcome="ok")]
    tests = line("part", "1", part="tests", outcome="killed")
    assert settled([ours, theirs, rounds, *left_out, tests]) == [
        timing("1", "bert_fast", "fwd", 1.0, gb_s=2.0), timing("1", "eager", "fwd", 2.0, bert_fast_speedup=2.0),
        on_cpu("1", 1.0, rounds=3), tests,
    ]  # fmt: skip


LINES = [
    step("1", "bert_fast", 3.0), step("1", "eager", 3.5),
    *(line("test", "1", test=f"tests/{file}.py::test[{n}::]", outcome="passed") for file in "ab" for n in (1, 2)),
    line("test", "1", test="tests/b.py::Class::test_plain", outcome="passed"),
    line("test", "1", test="tests/a.py::x", outcome="failed", message="why"),
    line("verify", "1", family="linear", case=KERNEL, ok=True, error=None, kernels={"_a": "d1", "_b": "d2"}),
    line("verify", "1", family="linear", case="kernel/other", ok=False, error="wrong", kernels={}),
    timing("1", "bert_fast", "fwd", 1.0, verified=True, kernels={"_a": "d1", "_b": "d2"}),
    timing("1", "bert_fast", "bwd", 2.0, verified=True, kernels={"_a": "d1", "_b": "d2"}),
    timing("1", "eager", "fwd", 3.0), timing("1", "eager", "bwd", 4.0),
    timing("1", "bert_fast", "fwd", 1.5, verified=True, kernels={"_a": "d1"}), timing("1", "liger", "fwd", 2.5),
    line("run", "1", case="run/base", provider="bert_fast", tokens_per_s=9.0),
    step("2", "sdpa", 4.0), *(product("2", name, 1.0, n) for n in (2, 4) for name in ("library", "x")),
    line("profile", "2", case=CASE, provider="bert_fast", kernels=[["_a", 1.5, 2.0]]),
    line("sanitizer", "3", tool="memcheck", outcome="passed", kernels=["_a"]),
]  # fmt: skip


def write(path: Path, lines: Iterable[Line]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def in_order(lines: Iterable[Line]) -> list[str]:
    return sorted(json.dumps(one, sort_keys=True) for one in lines)


@pytest.mark.parametrize("lines", [LINES, [on_cpu("1", 1.0), on_cpu("2", 2.0, case="y")]], ids=["gpu", "cpu"])
def test_a_file_is_read_as_before(lines: list[Line], tmp_path: Path) -> None:
    """Each line with what its run shares, each contestant, test and kernel by itself."""
    file = write(tmp_path / "a.jsonl", lines)
    main(str(tmp_path))
    assert in_order(read_lines(file)) == in_order(lines)


def test_a_file_says_once_what_lines_share(tmp_path: Path) -> None:
    file = write(tmp_path / "gpu.jsonl", LINES)
    main(str(tmp_path))
    text = file.read_text()
    assert text.count("Some GPU") == 3 and text.count('"d1"') == 2 and text.count("block_m") == 1
    found = [one for one in map(json.loads, text.splitlines()) if one["kind"] != "shared"]
    assert [one["mode"] for one in found if one["kind"] == "timing"] == [
        {
            "fwd": {"provider": {"bert_fast": {"us": 1.0, "verified": True}, "eager": {"us": 3.0}}},
            "bwd": {"provider": {"bert_fast": {"us": 2.0, "verified": True}, "eager": {"us": 4.0}}},
        },
        "fwd",
    ]
    passed = {one["file"]: one["passed"] for one in found if one["kind"] == "tests"}
    assert passed == {
        "tests/a.py": {"test": ["1::", "2::"]},
        "tests/b.py": {"test": ["1::", "2::"], "Class::test_plain": []},
    }


def test_settled_results_stay_as_they_are_and_go_on(tmp_path: Path) -> None:
    gpu = write(tmp_path / "gpu.jsonl", LINES)
    main(str(tmp_path))
    once = gpu.read_bytes()
    main(str(tmp_path))
    assert gpu.read_bytes() == once
    newer = step("4", "bert_fast", 1.0)
    with gpu.open("a") as file:
        file.write(json.dumps(newer) + "\n")
    for _ in range(2):
        steps = [one for one in read_lines(gpu) if one["kind"] == "step"]
        assert in_order(steps) == in_order([step("2", "sdpa", 4.0), newer, *LINES[:2]]) and steps[-1] == newer
        main(str(tmp_path))


def test_lines_that_cannot_be_settled_stay(tmp_path: Path) -> None:
    """A file is replaced only by one that is read back as it is."""
    trial = {"kind": "trial", "gpu": "g", "run": "1", "time": "t", "case": "a", "us": 1.0}
    for line in (trial, trial | {"kind": "step"}):
        file = write(tmp_path / "gpu.jsonl", [line])
        before = file.read_bytes()
        with pytest.raises(SystemExit, match=r"gpu\.jsonl: lines without '\w+' cannot be settled"):
            main(str(tmp_path))
        assert file.read_bytes() == before


def test_what_an_older_version_settled_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "gpu.jsonl", [{"kind": "run", "run": "1", "gpu": "g", "time": "t"}])
    with pytest.raises(SystemExit, match="an older version settled"):
        list(read_lines(file))
