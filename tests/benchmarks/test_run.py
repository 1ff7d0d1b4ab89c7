"""`python -m benchmarks.run` on a CPU: kernel cases are verified, then timed; a wrong one is stored as wrong."""

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks import registry, run
from benchmarks.kit.results import ROOT, Recorder, gpu_environment, read_lines
from benchmarks.kit.study import Study
from tests.benchmarks.conftest import FAMILY


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setattr(run, "kernel_cases", lambda size: registry.kernel_cases("small", [FAMILY]))
    return dataclasses.replace(run.STUDY, file=tmp_path / "cpu.jsonl")


def test_cases_are_chosen_verified_timed_and_stored(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["--only", "fp32/right", "--rounds", "1"]) == 0
    lines = list(read_lines(study.file))
    assert [(line["kind"], line.get("provider"), line.get("mode")) for line in lines] == [
        ("verify", None, None),
        ("timing", "bert_fast", "fwd"),
        ("timing", "bert_fast", "bwd"),
        ("timing", "eager", "fwd"),
        ("timing", "eager", "bwd"),
    ]
    assert all(line["case"].endswith("fp32/right") and line["processor"] and "gpu" not in line for line in lines)
    assert lines[1]["verified"] is True
    assert "bert_fast_speedup" in capsys.readouterr().out and {line["rounds"] for line in lines[1:]} == {5}


def test_a_wrong_case_is_not_timed_and_fails_the_run(study: Study) -> None:
    assert study.main(["--only", "fp32/wrong"]) == 1
    assert [(line["kind"], line["ok"]) for line in read_lines(study.file)] == [("verify", False)]


def test_listing_and_dry_runs_store_nothing(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "component/linear/940x768x3072" in listed and "minilm/full@128/random/training" in listed
    assert study.main(["--only", "fp32/peers", "--rounds", "1", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "fp32/peers fwd liger: us " in shown and "fp32/peers apex: ImportError: half an installation" in shown
    assert not study.file.exists()


def test_lines_do_not_name_folders_of_this_machine(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.jsonl", {"run": 1})
    recorder.write("verify", error=f"{ROOT}/benchmarks/kernels.py, line 1")
    (line,) = recorder.of_this_run("verify")
    assert line["error"] == "benchmarks/kernels.py, line 1"
    assert Recorder(recorder.path, {"run": 2}).of_this_run("verify") == []


def test_the_environment_names_versions_and_commit() -> None:
    found = gpu_environment("cpu", commit="c0ffee")
    assert found["gpu"] is None and found["commit"] == "c0ffee"
    assert found["torch"] == torch.__version__
    assert gpu_environment("cpu")["run"] != found["run"]
