import dataclasses
import json
from pathlib import Path

import pytest

from bert_fast.errors import SourceError
from bert_fast.training.observers import Plan
from bert_fast.training.reporting import RunDirectory, default_observers


def test_a_start_is_written_down(plan: Plan) -> None:
    run = RunDirectory(plan.output_dir)
    assert not run.path.exists()
    run.start(plan)
    stored = run.read()
    assert stored["plan"]["num_parameters"] == plan.num_parameters
    assert stored["plan"]["output_dir"] == str(plan.output_dir)
    (start,) = stored["starts"]
    assert start["machine"]["device"] == "NVIDIA H200"
    assert start["machine"]["cores"] >= 1
    assert {"bert_fast", "Python", "torch", "numpy"} <= start["versions"].keys()
    assert "pytest" in start["command"] or "python" in start["command"]
    assert (start["ended"], start["outcome"]) == (None, None)
    run.end("finished")
    assert run.read()["starts"][0]["outcome"] == "finished"
    assert run.read()["starts"][0]["ended"] >= start["time"]


def test_every_start_of_a_run_that_goes_on_is_kept(plan: Plan) -> None:
    run = RunDirectory(plan.output_dir)
    run.start(plan)  # and then it was killed
    for first_step in (10, 20):
        run.start(dataclasses.replace(plan, first_step=first_step))
        run.end("interrupted")
    starts = run.read()["starts"]
    assert [start["first_step"] for start in starts] == [0, 10, 20]
    assert [start["outcome"] for start in starts] == [None, "interrupted", "interrupted"]
    run.start(plan)
    assert [start["first_step"] for start in run.read()["starts"]] == [0]


def test_the_settings_come_back(plan: Plan) -> None:
    yaml = pytest.importorskip("yaml", reason="reads config.yaml")
    config = {
        "learning_rate": 3e-5,
        "output_dir": Path("a/ü"),
        "betas": (0.9, 0.999),
        "labels": ["是", "no: #"],
        "n": None,
    }
    run = RunDirectory(plan.output_dir)
    run.start(dataclasses.replace(plan, config=config))
    read = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    assert read == config | {"output_dir": "a/ü", "betas": [0.9, 0.999]}
    assert list(read) == list(config)  # in the order of the settings


def test_the_settings_without_pyyaml_are_json(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    run = RunDirectory(plan.output_dir)
    run.start(plan)
    assert json.loads(run.config.read_text(encoding="utf-8")) == plan.config


def test_the_directory_explains_every_file(plan: Plan) -> None:
    run = RunDirectory(plan.output_dir)
    run.start(plan)
    text = (run.path / "README.txt").read_text(encoding="utf-8")
    paths = (
        run.run_json, run.config, run.metrics, run.report, run.tensorboard, run.checkpoints, run.model,
        run.predictions, run.failed_batch,
    )  # fmt: skip
    for path in paths:
        assert path.parent == run.path
        assert f"\n{path.name}" in f"\n{text}", path.name
    assert {path.name for path in run.path.iterdir()} == {"README.txt", "run.json", "config.yaml"}


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}", b'{"plan": {}, "starts": []}', b"\xff\xfe"])
def test_what_is_no_run_is_an_error_that_names_it(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(SourceError, match=tmp_path.name):
        RunDirectory(tmp_path).read()


def test_an_end_without_a_start_does_no_harm(plan: Plan) -> None:
    RunDirectory(plan.output_dir).end("failed: no examples")
    assert not plan.output_dir.exists()
    run = RunDirectory(plan.output_dir)
    run.start(plan)
    run.end("finished")
    RunDirectory(plan.output_dir).end("failed: holds a run already")
    assert [start["outcome"] for start in run.read()["starts"]] == ["finished"]


def test_default_observers_write_nothing_before_the_start(tmp_path: Path) -> None:
    quiet = default_observers(tmp_path / "run", quiet=True)
    loud = default_observers(tmp_path / "run")
    assert len(loud) == len(quiet) + 1
    for observer in loud:
        observer.end("failed: no examples")
    assert not (tmp_path / "run").exists()


def test_a_start_that_fails_is_all_that_fails(plan: Plan) -> None:
    plan.output_dir.parent.mkdir(exist_ok=True)
    plan.output_dir.write_text("a file", encoding="utf-8")
    below = dataclasses.replace(plan, output_dir=plan.output_dir / "below")
    observers = default_observers(below.output_dir, quiet=True)
    with pytest.raises(OSError, match="below"):
        observers[0].start(below)
    for observer in observers:
        observer.end("failed: no directory")
