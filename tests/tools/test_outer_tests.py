"""Other projects' tests, untouched and fused: here a project of three tests, one of which sees the difference."""

from pathlib import Path

import pytest

from tools.outer_tests.__main__ import compare, folder_of, main

pytest.importorskip("transformers", reason="the package transformers is not installed")

TESTS = """
import torch
from transformers import BertConfig, BertModel


def model():
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return BertModel(config).eval()


def test_forward():
    assert model()(torch.arange(6).view(2, 3)).last_hidden_state.shape == (2, 3, 16)


def test_class_is_their_own():
    assert "Fused" not in str(type(model()).__mro__)


def test_of_nothing():
    assert False
"""


def test_both_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "project" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_theirs.py").write_text(TESTS)
    assert main([str(folder), "-p", "no:randomly"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["untouched", "3", "2", "1", "0", "0", "0"]
    assert lines[2].split() == ["fused", "3", "1", "2", "0", "1", "0"]
    assert lines[3:] == ["fails only fused: tests/test_theirs.py::test_class_is_their_own"]


def test_what_is_worse_and_what_is_better() -> None:
    untouched = {"a": "passed", "b": "failed", "c": "skipped", "d": "failed", "e": "passed"}
    fused = {"a": "failed", "b": "passed", "c": "skipped", "d": "failed"}
    assert compare(untouched, fused) == (["a", "e"], ["b"])


def test_pytest_runs_where_the_project_does(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "models" / "tests"
    folder.mkdir(parents=True)
    assert folder_of(folder / "test_a.py") == tmp_path
    assert folder_of(tmp_path) == tmp_path


def test_a_path_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])
    assert "paths: there is no" in capsys.readouterr().err
