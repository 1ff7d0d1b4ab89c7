"""`make gpu-smoke` on the CPU: what is wrong is named and located, what dies or hangs takes nothing with it."""

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import status
from benchmarks.kit.record import ROOT, read_lines
from benchmarks.smoke import __main__ as smoke
from tests.benchmarks.smoke_family import FAMILY
from tests.patience import PATIENCE_S

Ran = tuple[int, list[dict[str, Any]], str]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Runs the command; exit status, lines of its results, what it said."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def run_command(*arguments: str) -> Ran:
        done = smoke.main(["--results", str(tmp_path), "--commit", "c0ffee", *arguments])
        lines = [line for path in sorted(tmp_path.glob("*.jsonl")) for line in read_lines(path)]
        return done, lines, capsys.readouterr().out

    yield run_command
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def quick(command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """The command with processes that are up at once and do what their family's name says."""
    monkeypatch.setattr(smoke, "WORKER", (sys.executable, str(ROOT / "tests" / "benchmarks" / "smoke_worker.py")))
    names = ["dies", "hangs", "dies-hangs", "breaks", "green", "unimportable", "silent"]
    monkeypatch.setattr(smoke, "family_names", lambda: names)
    return command


def outcomes(lines: list[dict[str, Any]]) -> dict[tuple[str, bool], str]:
    return {(line["case"].rsplit("/", 1)[-1], line["blocking"]): line["outcome"] for line in lines}


@pytest.mark.slow
def test_the_command_from_end_to_end_on_a_cpu(command: Callable[..., Ran]) -> None:
    done, lines, said = command(
        "--device", "cpu", "--size", "small", "--families", FAMILY, "--seconds", str(PATIENCE_S),
        "--case-seconds", str(PATIENCE_S),
    )  # fmt: skip
    assert done == 1
    by_case = {(line["case"].rsplit("/", 1)[1], line["blocking"]): line for line in lines}
    assert {name: line["outcome"] for name, line in by_case.items()} == {
        ("right", False): "green", ("wrong", False): "red", ("not finite", False): "red", ("raising", False): "red",
        ("dying", False): "crash", ("dying", True): "crash", ("drifting", False): "red", ("last", False): "green",
    }  # fmt: skip
    assert {line["kind"] for line in lines} == {"smoke"} and {line["commit"] for line in lines} == {"c0ffee"}
    right = by_case["right", False]
    assert set(right["times"]) == {"fwd", "bwd"} and right["times"]["fwd"]["us"] > 0
    assert [one["output"] for one in right["outputs"]] == ["y", "dx", "dweight"]
    y = next(one for one in by_case["wrong", False]["outputs"] if one["output"] == "y")
    assert y["first_bad"] == [3, 5] and y["bad_share"] == 3 / 128 and abs(y["worst"] - 0.5) < 1e-5
    assert "y: worst 5.0e-01 of" in said and "2.34% bad, the first at [3, 5]" in said
    y = next(one for one in by_case["not finite", False]["outputs"] if one["output"] == "y")
    assert y["first_bad"] == [3, 5] and y["not_finite"] == 3 and y["worst"] < 1e-5
    assert "the kernel does not compile (tests/benchmarks/smoke_family.py" in by_case["raising", False]["error"]
    assert "status -6: blocking None" in by_case["dying", False]["error"]
    assert "status -6: blocking 1" in by_case["dying", True]["error"]
    assert "two runs differ in output" in by_case["drifting", False]["error"]
    *_, last = said.splitlines()
    assert last.startswith(f"red: kernel/{FAMILY}/8x16/fp32/wrong; ") and last.endswith(
        "2 cases green, 0 kernels launched"
    )


def test_after_a_crash_the_case_is_run_again_alone_and_the_rest_goes_on(quick: Callable[..., Ran]) -> None:
    done, lines, said = quick("--families", "breaks,dies,green", "--seconds", str(PATIENCE_S))
    assert done == 1
    for family, why in (("breaks", "an illegal memory access"), ("dies", "status -6: the reason")):
        own = [line for line in lines if line["family"] == family]
        assert outcomes(own) == {
            ("fine", False): "green", (family, False): "crash", (family, True): "red", ("last", False): "green"
        }  # fmt: skip
        assert why in next(line["error"] for line in own if line["outcome"] == "crash")
        assert next(line["error"] for line in own if line["blocking"]) == "an illegal access in _a_kernel"
    assert said.splitlines()[0] == "gpu Made up (test), commit c0ffee"
    assert "again with CUDA_LAUNCH_BLOCKING=1" in said
    assert re.fullmatch(r"red: [a-z/; ]+ \| 7 cases green, 1 kernels launched", said.splitlines()[-1])


def test_what_hangs_is_ended_and_named(quick: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "START_S", 8.0)
    done, lines, _ = quick("--families", "dies-hangs,silent", "--seconds", str(PATIENCE_S), "--case-seconds", "4")
    assert done == 1
    found = outcomes(lines)
    assert found["hangs", False] == "hang" and found["hangs", True] == "red" and found["last", False] == "green"
    assert found["silent", False] == "hang"
    assert next(line["error"] for line in lines if line["outcome"] == "hang").startswith("nothing came for")


def test_what_cannot_be_started_is_red_once(quick: Callable[..., Ran]) -> None:
    done, lines, said = quick("--families", "unimportable", "--seconds", str(PATIENCE_S))
    assert done == 1
    assert [(line["case"], line["outcome"]) for line in lines] == [("unimportable", "crash")]
    assert "no module named so" in said and said.splitlines()[-1].startswith("red: unimportable")


def test_at_the_deadline_what_is_left_is_named_and_never_passed(quick: Callable[..., Ran], tmp_path: Path) -> None:
    done, lines, said = quick("--families", "hangs,green", "--seconds", "6", "--jobs", "1", "--case-seconds", "100")
    assert done == 1
    left = [line["case"] for line in lines if line["outcome"] == "not run"]
    assert left[-1] == "green" and "hangs/hangs" in left and "hangs/last" in left
    assert f"not run: {'; '.join(left[:-1])}; all of green | " in said.splitlines()[-1]
    (file,) = tmp_path.glob("*.jsonl")
    assert {job.family: job.cases for job in smoke.red_jobs(file)} == {"hangs": left[:-1], "green": None}


def test_all_green_is_said_and_is_no_result_that_pays_what_is_owed(quick: Callable[..., Ran], tmp_path: Path) -> None:
    done, lines, said = quick("--families", "green", "--seconds", str(PATIENCE_S))
    assert done == 0 and {line["outcome"] for line in lines} == {"green"}
    assert said.splitlines()[-1] == "all is green: 3 cases green, 1 kernels launched"
    assert status.measured(tmp_path) == set()


def test_what_was_red_can_be_run_again(quick: Callable[..., Ran], tmp_path: Path) -> None:
    quick("--families", "breaks,green,unimportable", "--seconds", str(PATIENCE_S))
    (file,) = tmp_path.glob("*.jsonl")
    jobs = {job.family: job.cases for job in smoke.red_jobs(file)}
    assert jobs == {"breaks": ["breaks/breaks"], "unimportable": None}
    before = len(list(read_lines(file)))
    quick("--only-red", str(file), "--seconds", str(PATIENCE_S))
    again = [line["case"] for line in read_lines(file)][before:]
    assert sorted(set(again)) == ["breaks/breaks", "unimportable"]
    green = tmp_path / "green.txt"
    green.write_text("".join(json.dumps(line) + "\n" for line in read_lines(file) if line["outcome"] == "green"))
    done, _, said = quick("--only-red", str(green))
    assert done == 0 and said == f"nothing is red in {green}\n"


def test_a_family_may_have_several_processes(command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = smoke.all_jobs(["a", "attention"])
    assert [(job.family, job.share) for job in jobs] == [("a", "0/1"), *(("attention", f"{i}/3") for i in range(3))]
    monkeypatch.setattr(smoke, "SHARES", {"layer_norm": 2})
    done, lines, _ = command(
        "--device", "cpu", "--size", "small", "--families", "layer_norm", "--seconds", str(PATIENCE_S),
        "--case-seconds", str(PATIENCE_S),
    )  # fmt: skip
    assert done == 0
    assert sorted(line["case"].split("/")[2] for line in lines) == ["37x100", "37x768"]


def test_without_a_device_nothing_is_run(command: Callable[..., Ran]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    done, lines, said = command("--families", "whole", "--seconds", str(PATIENCE_S))
    assert (done, lines) == (1, [])
    assert said.startswith("no CUDA or ROCm device") and said.count("\n") == 1
