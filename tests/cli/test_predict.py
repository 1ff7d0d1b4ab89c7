"""`bert-fast predict`."""

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bert_fast.cli import main
from bert_fast.training.tasks import TASKS
from tests.cli.conftest import error_of, finetune
from tests.cli.processes import without_reader
from tests.process_server import run

LENGTH = ["--max_seq_length", "40"]


@contextlib.contextmanager
def stdin_of(content: bytes, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Standard input with some bytes in it."""
    (folder / "stdin").write_bytes(content)
    with open(folder / "stdin", encoding="utf-8") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", file)
        yield


def answers(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("task", TASKS)
def test_a_model_says_what_it_learned(
    task: str, runs: dict[str, Path], task_files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard output and in a file; its metrics are those that its training ended with."""
    command = ["predict", str(runs[task]), str(task_files[task]), *LENGTH]
    capsys.readouterr()
    assert main.main(command) == 0
    shown = capsys.readouterr()
    rows = answers(shown.out)
    assert shown.err == "" and len(rows) == {"classify": 160, "ner": 60, "qa": 24, "choice": 20}[task]
    if task == "classify":
        assert all(row["label"] == ("positive" if "good" in row["text"].split() else "negative") for row in rows)
        assert all(row["label"] == max(row["probabilities"], key=row["probabilities"].get) for row in rows)
    elif task == "ner":
        tags = {"John": "B-PER", "Mary": "B-PER", "Oslo": "B-LOC", "Paris": "B-LOC"}
        assert all(row["labels"] == [tags.get(word, "O") for word in row["tokens"]] for row in rows)
    elif task == "qa":
        assert [row["id"] for row in rows] == [f"q{index}" for index in range(24)]
    else:
        assert [row["label"] for row in rows] == [index % 4 for index in range(20)]
    assert main.main([*command, "--output_file", str(tmp_path / "said")]) == 0
    assert capsys.readouterr().out == "" and (tmp_path / "said").read_text() == shown.out
    assert main.main([*command, "--evaluate"]) == 0
    (found,) = answers(capsys.readouterr().out)
    kept = json.loads((runs[task] / "eval_results.json").read_text())
    assert found == {name: value for name, value in kept.items() if name in found} and "eval_loss" in found
    assert len(found) == len([name for name in kept if "_per_second" not in name and "runtime" not in name]) - 1


def test_lines_of_stdin(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["predict", str(runs["classify"]), "-", *LENGTH]
    with stdin_of('{"text": "good film"}\r\n{"text": "bad é", "id": 7}'.encode(), monkeypatch, tmp_path):
        assert main.main(command) == 0
    assert [(row["text"], row["label"]) for row in answers(capsys.readouterr().out)] == [
        ("good film", "positive"), ("bad é", "negative")
    ]  # fmt: skip
    for content, message in (
        (b'{"text": "a"}\n[1]\n', "-: line 2: expected a JSON object, got list"),
        (b'{"text": "a"}\n{"text": \n', "-: line 2: expected a JSON object: "),
        (b'{"text": "\xff"}\n', "-: line 1: expected a JSON object: "),
        (b"[" * 100_000, "-: line 1: expected a JSON object: "),
        (b'{"txt": "a"}\n', "expected a column 'text', got 'txt'"),
        (b'{"text": 1}\n', "column 'text': expected a string, got 1"),
        (b"", "expected at least one row, got none"),
    ):
        with stdin_of(content, monkeypatch, tmp_path):
            assert message in error_of(command, capsys)


def test_pairs_of_texts(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.tsv").write_text("first\tsecond\tlabel\na\tb\t1\nb\ta\t0\n")
    columns = {"text_column_name": "first", "text_pair_column_name": "second"}
    assert main.main(finetune("classify", tiny_model, tmp_path / "x.tsv", tmp_path / "run", **columns)) == 0
    capsys.readouterr()
    command = ["predict", str(tmp_path / "run"), str(tmp_path / "x.tsv")]
    error = error_of([*command, "--text_column_name", "text"], capsys)
    assert error == f"{tmp_path / 'x.tsv'}: expected a column 'text', got 'first', 'second', 'label'"
    assert main.main(command) == 0  # columns and length are those of training
    assert [(row["first"], row["second"]) for row in answers(capsys.readouterr().out)] == [("a", "b"), ("b", "a")]


def test_a_model_of_several_classes_a_text(
    runs: dict[str, Path], reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(runs["classify"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"problem_type": "multi_label_classification"}))
    assert "expected a model that gives a text one class" in error_of(
        ["predict", str(folder), str(reviews / "valid.tsv")], capsys
    )


def test_what_cannot_be_answered_is_one_line(
    runs: dict[str, Path], reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other.tsv").write_text("text\tlabel\na\tpositive\na\tfine\n")
    command = ["predict", str(runs["classify"]), str(reviews / "valid.tsv"), *LENGTH]
    before = sorted(tmp_path.iterdir())
    for options, message in (
        (["--output_file", str(tmp_path / "file" / "answers")], "answers cannot be written: "),
        (["--output_file", str(tmp_path)], f"output_file: {tmp_path} cannot be written: Is a directory"),
        (["--output_file="], "output_file: expected the name of a file, got ''"),
        (["--max_seq_length", "65"], "max_seq_length: expected at most the model's 64 positions, got 65"),
        (["--per_device_eval_batch_tokens", "0"], "per_device_eval_batch_tokens: expected "),
    ):
        assert message in error_of([*command, *options], capsys)
    command[2] = str(tmp_path / "other.tsv")
    assert "other.tsv: line 3: column 'label': expected one of the labels" in error_of([*command, "--evaluate"], capsys)
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(SystemExit) as exit_info:
        main.main([*command, "--train_fil", "x"])
    assert exit_info.value.code == 2


def test_its_help(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main.main(["predict"]) == 2 and main.main(["predict", "--help"]) == 0
    with pytest.raises(SystemExit) as exit_info:
        main.main(["predict", str(runs["classify"]), "x.tsv", "--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert "--text_column_name" in shown and "--output_file" in shown and "--train_file" not in shown


def test_a_reader_that_leaves(runs: dict[str, Path], reviews: Path, tmp_path: Path) -> None:
    command = ["predict", str(runs["classify"]), str(reviews / "valid.tsv"), *LENGTH]
    done = run(without_reader, command, folder=tmp_path)
    assert (done.returncode, done.stderr) == (141, "")
