import argparse
import json
from pathlib import Path

import pytest

from bert_fast.cli import report
from bert_fast.cli.main import main
from bert_fast.errors import SourceError


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.run(parser.parse_args(arguments))


def test_the_page_is_made_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {
        "task": "classify", "model": "BertForSequenceClassification", "config": {"epochs": 3}, "num_parameters": 1000,
        "num_examples": 10, "num_valid_examples": 0, "steps": 5, "metric": "accuracy",
    }  # fmt: skip
    machine = {"device": "CPU", "processes": 1, "processor": "some", "cores": 2, "system": "Linux"}
    start = {
        "time": "2026-01-31T12:00:00+01:00", "first_step": 0, "command": "bert-fast finetune", "directory": "/",
        "versions": {"torch": "2"}, "machine": machine, "ended": None, "outcome": None,
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({"plan": plan, "starts": [start]}), encoding="utf-8")
    assert call(str(tmp_path)) == 0
    page = tmp_path / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert "classify: BertForSequenceClassification" in page.read_text(encoding="utf-8")


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SourceError, match="holds no run"):
        call(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bert-fast report: ")
    assert "Traceback" not in error
