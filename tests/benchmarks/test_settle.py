"""Settled results say what they said before, in fewer and shorter lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.record import read_lines
from benchmarks.kit.settle import main, settled

CASE = "step/base/full@128/B256"
Line = dict[str, Any]


def line(kind: str, run: str, **fields: Any) -> Line:
    return {"run": run, "gpu": "Some GPU", "torch": "2.11", "dirty": False, "kind": kind, "time": f"{run}0"} | fields


def step(run: str, provider: str, ms: float) -> Line:
    return line("step", run, case=CASE, provider=provider, ms=ms)


def product(run: str, candidate: str, speedup: float) -> Line:
    tile = None if candidate == "library" else candidate
    named: Line = {"product": "plain", "layout": "nt", "dtype": "bf16", "m": 1, "n": 2, "k": 3, "source": "a"}
    return line(
        "gemm", run, **named, candidate=candidate, tile=tile, us=1.0, speedup_over_library=speedup, verified=True
    )  # fmt: skip


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPU's results, and those of a CPU."""
    tests = [line("test", "1", test=f"tests/{file}.py::test[{n}::]", outcome="passed") for file in "ab" for n in (1, 2)]
    lines = [
        step("1", "bert_fast", 3.0), *tests, line("test", "1", test="tests/a.py::x", outcome="failed", message="why"),
        line("test", "1", test="tests/a.py::y", outcome="skipped"), step("2", "sdpa", 4.0),
    ]  # fmt: skip
    for name, those in (("gpu", lines), ("cpu", [{"case": "x", "ms": 1}, {"case": "x", "ms": 2}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in those))
    return tmp_path


def test_a_file_is_read_as_before(folder: Path) -> None:
    """Each line with what its run shares, each test by itself; what was skipped is gone."""
    gpu, cpu = folder / "gpu.jsonl", (folder / "cpu.jsonl").read_bytes()
    before = [one for one in read_lines(gpu) if one.get("outcome") != "skipped"]
    main(str(folder))

    def in_order(lines: Any) -> list[str]:
        return sorted(json.dumps(one | {"time": ""}, sort_keys=True) for one in lines)

    assert in_order(read_lines(gpu)) == in_order(before)
    assert gpu.read_text().count("Some GPU") == 2 and len(gpu.read_text().splitlines()) == 6
    assert (folder / "cpu.jsonl").read_bytes() == cpu


def test_settled_results_stay_as_they_are_and_go_on(folder: Path) -> None:
    main(str(folder))
    gpu = folder / "gpu.jsonl"
    once = gpu.read_bytes()
    main(str(folder))
    assert gpu.read_bytes() == once
    newer = step("3", "bert_fast", 1.0)
    with gpu.open("a") as file:
        file.write(json.dumps(newer) + "\n")
    main(str(folder))
    steps = [one for one in read_lines(gpu) if one["kind"] == "step"]
    assert steps == [step("2", "sdpa", 4.0), newer]
