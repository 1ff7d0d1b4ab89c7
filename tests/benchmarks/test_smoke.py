"""`make gpu-smoke` on the CPU: what is wrong is named and located, what dies or hangs takes nothing with it."""

import itertools
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import status
from benchmarks.gpu.smoke import SHARES, red_cases
from benchmarks.kit.results import ROOT, read_lines
from tests.benchmarks.smoke_family import FAMILY
from tests.patience import PATIENCE_S

Line = dict[str, Any]
Ran = tuple[int, list[Line], str]
WORKER = str(ROOT / "tests" / "benchmarks" / "smoke_worker.py")


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Runs the command; exit status, lines of its cases, what it said."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def run_command(*arguments: str, seconds: float = PATIENCE_S) -> Ran:
        options = ["--parts", "smoke", "--device", "cpu", "--size", "small", "--minutes", str(seconds / 60)]
        done = gpu.main([*options, "--results", str(tmp_path), "--commit", "c0ffee", *arguments])
        lines = [line for path in sorted(tmp_path.glob("*.jsonl")) for line in read_lines(path)]
        return done, [line for line in lines if line["kind"] == "smoke"], capsys.readouterr().out

    yield run_command
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def quick(command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """The command with processes that are up at once and do what their family's name says."""
    runs = itertools.count()

    def quick_command(part: str, run_file: Path, device: str) -> tuple[str, ...]:
        return sys.executable, WORKER, "--run", str(run_file)

    def environment(device: str, commit: str) -> Line:
        return {"run": f"run {next(runs)}", "gpu": "Made up (test)", "commit": commit}

    monkeypatch.setattr(gpu, "command_of", quick_command)
    monkeypatch.setattr(gpu, "probe", environment)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = ["dies", "hangs", "dies-hangs", "breaks", "green", "unimportable", "silent"]
    monkeypatch.setattr(gpu, "family_names", lambda: names)
    return command


def outcomes(lines: list[Line]) -> dict[tuple[str, bool], str]:
    return {(line["case"].rsplit("/", 1)[-1], line["blocking"]): line["outcome"] for line in lines}


@pytest.mark.slow
def test_the_command_from_end_to_end_on_a_cpu(command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "family_names", lambda: [FAMILY])
    done, lines, said = command("--families", FAMILY)
    assert done == 1
    by_case = {(line["case"].rsplit("/", 1)[1], line["blocking"]): line for line in lines}
    assert {name: line["outcome"] for name, line in by_case.items()} == {
        ("right", False): "green", ("wrong", False): "red", ("not finite", False): "red", ("raising", False): "red",
        ("dying", False): "crash", ("dying", True): "crash", ("drifting", False): "red", ("last", False): "green",
    }  # fmt: skip
    assert {line["commit"] for line in lines} == {"c0ffee"}
    right = by_case["right", False]
    assert set(right["times"]) == {"fwd", "bwd"} and right["times"]["fwd"]["us"] > 0
    assert [one["output"] for one in right["outputs"]] == ["y", "dx", "dweight"]
    y = next(one for one in by_case["wrong", False]["outputs"] if one["output"] == "y")
    assert y["first_bad"] == [3, 5] and y["bad_share"] == 3 / 128 and abs(y["worst"] - 0.5) < 1e-5
    assert "y: worst 5.0e-01 of" in said and "2.34% bad, the first at [3, 5]" in said
    y = next(one for one in by_case["not finite", False]["outputs"] if one["output"] == "y")
    assert y["first_bad"] == [3, 5] and y["not_finite"] == 3 and y["worst"] < 1e-5
    assert "the kernel does not compile (tests/benchmarks/smoke_family.py" in by_case["raising", False]["error"]
    for is_alone, value in ((False, None), (True, 1)):
        error = by_case["dying", is_alone]["error"]
        assert "the process ended with status -6: " in error and f"blocking {value}" in error
    assert "two runs differ in output" in by_case["drifting", False]["error"]
    assert "smoke: 4 red, 2 green, 2 crash; 0 kernels launched" in said
    assert f"  red: kernel/{FAMILY}/8x16/fp32/wrong: " in said and said.splitlines()[-1].startswith("red: ")


def test_after_a_crash_the_case_is_run_again_alone_and_the_rest_goes_on(quick: Callable[..., Ran]) -> None:
    done, lines, said = quick("--families", "breaks,dies,green")
    assert done == 1
    for family, why in (("breaks", "an illegal memory access"), ("dies", "status -6: the reason")):
        own = [line for line in lines if line["family"] == family]
        assert outcomes(own) == {
            ("fine", False): "green", (family, False): "crash", (family, True): "red", ("last", False): "green"
        }  # fmt: skip
        assert len(own) == 4 and why in next(line["error"] for line in own if line["outcome"] == "crash")
        assert next(line["error"] for line in own if line["blocking"]) == "an illegal access in _a_kernel"
    assert said.splitlines()[0] == "run run 0, gpu Made up (test), commit c0ffee"
    assert "smoke: 7 green, 2 crash, 2 red; 1 kernels launched" in said and "smoke dies: crashed in dies/dies" in said


def test_what_hangs_is_ended_and_named(quick: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CASE_S", 0.4)
    monkeypatch.setattr(gpu, "START_S", 0.8)
    done, lines, _ = quick("--families", "dies-hangs,silent")
    assert done == 1
    found = outcomes(lines)
    assert found["hangs", False] == "hang" and found["hangs", True] == "red" and found["last", False] == "green"
    assert found["silent", False] == "hang"
    assert {line["error"] for line in lines if line["outcome"] == "hang"} == {"nothing came for too long"}


def test_what_cannot_be_started_is_red_once(quick: Callable[..., Ran]) -> None:
    done, lines, said = quick("--families", "unimportable")
    assert done == 1
    assert [(line["case"], line["outcome"]) for line in lines] == [("unimportable", "crash")]
    assert "  crash: unimportable: the process ended with status 1: no module named so" in said


def test_at_the_deadline_what_is_left_is_named_and_never_passed(
    quick: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 1)  # two processes at once
    done, lines, said = quick("--families", "hangs,dies-hangs,green,silent", seconds=6.0)
    assert done == 1
    left = {line["case"] for line in lines if line["outcome"] == "not run"}
    assert {"hangs/hangs", "hangs/last", "dies-hangs/hangs", "dies-hangs/last", "silent"} <= left
    assert "  not run: hangs/last" in said and "silent" in said.splitlines()[-2]
    (file,) = tmp_path.glob("*.jsonl")
    red = red_cases(file)
    assert red["hangs"] == ["hangs/hangs", "hangs/last"] and red["silent"] is None


def test_all_green_is_said_and_is_no_result_that_pays_what_is_owed(quick: Callable[..., Ran], tmp_path: Path) -> None:
    done, lines, said = quick("--families", "green")
    assert done == 0 and {line["outcome"] for line in lines} == {"green"}
    assert said.splitlines()[-2:] == ["smoke: 3 green; 1 kernels launched", "nothing is red"]
    assert status.measured(tmp_path) == set()


def test_what_was_red_can_be_run_again(quick: Callable[..., Ran], tmp_path: Path) -> None:
    quick("--families", "breaks,green,unimportable")
    (file,) = tmp_path.glob("*.jsonl")
    assert red_cases(file) == {"breaks": ["breaks/breaks"], "unimportable": None}
    before = len([line for line in read_lines(file) if line["kind"] == "smoke"])
    _, lines, _ = quick("--only-red", str(file))
    assert sorted({line["case"] for line in lines[before:]}) == ["breaks/breaks", "unimportable"]
    green = tmp_path / "green.txt"
    green.write_text("".join(json.dumps(line) + "\n" for line in lines if line["outcome"] == "green"))
    done, _, said = quick("--only-red", str(green))
    assert done == 0 and said == f"nothing is red in {green}\n"


def test_a_family_may_have_several_processes(command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARES, "layer_norm", 2)
    done, lines, said = command("--families", "layer_norm")
    assert done == 0 and "smoke layer_norm 1/2" in said
    assert sorted(line["case"].split("/")[2] for line in lines) == ["37x100", "37x768"]


def test_what_takes_longest_is_started_first(tmp_path: Path) -> None:
    run_file = tmp_path / "run.json"
    gpu.Run(str(tmp_path / "r"), {}, families=["mlp", "dropout", "whole", "attention"]).write(run_file)
    (part,) = gpu.parts_apart(["smoke"], run_file, None)
    names = [process.name.removeprefix("smoke ") for process in part.processes]
    assert names == ["attention 0/3", "attention 1/3", "attention 2/3", "whole", "mlp", "dropout"]
