"""`bert-fast predict`."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bert_fast.cli import main, predict
from tests.patience import PATIENCE_S


@contextlib.contextmanager
def stdin_of(content: bytes) -> Iterator[None]:
    """Descriptor 0 is a pipe with some bytes in it, few enough for its buffer."""
    before = os.dup(0)
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


def answers(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_file_as_lines_and_as_the_task_writes_it(
    classify_run: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(reviews / "valid.tsv")
    assert main.main(["predict", str(classify_run), file]) == 0
    found = answers(capsys)
    assert [row["index"] for row in found] == list(range(40))
    for row in found:
        assert row["label"] == ("positive" if "good" in row["text"].split() else "negative")
        assert row["label"] == max(("negative", "positive"), key=lambda label: row[f"probability_{label}"])
    assert main.main(["predict", str(classify_run), file, "-o", str(tmp_path / "new" / "answers")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'answers.tsv'}\n"
    lines = (tmp_path / "new" / "answers.tsv").read_text().splitlines()
    assert [line.split("\t")[1] for line in lines[1:]] == [row["label"] for row in found]


def test_what_cannot_be_answered_is_one_line(
    classify_run: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for options, message in (
        (["--set", 'labels=["a", "b", "c"]'], "labels: expected 2, as many as the model has, got 3"),
        (["--set", "max_length=1_0"], "max_length: expected a whole number, got '1_0'"),
        (["-o", str(tmp_path / "file" / "answers")], f"File exists: '{tmp_path / 'file'}'"),
    ):
        assert main.main(["predict", str(classify_run), str(reviews / "valid.tsv"), *options]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_a_byte_order_mark_is_no_word(classify_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stdin_of("\ufeffgood film\nbad\n".encode()):
        assert main.main(["predict", str(classify_run), "-"]) == 0
    assert [row["text"] for row in answers(capsys)] == ["good film", "bad"]


def test_lines_of_stdin(
    classify_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty lines, CRLF, no line end at the end; the same answers however the bytes come."""
    content = "the good film\r\n\nbad é\ngood".encode()
    found = []
    for chunk_bytes in (1 << 18, 3):
        monkeypatch.setattr(predict, "_CHUNK_BYTES", chunk_bytes)
        with stdin_of(content):
            assert main.main(["predict", str(classify_run), "-"]) == 0
        found.append(answers(capsys))
    for rows in found:
        assert [row["index"] for row in rows] == [0, 1, 2, 3]
        assert [row["text"] for row in rows] == ["the good film", "", "bad é", "good"]
    assert [row["label"] for row in found[0]] == [row["label"] for row in found[1]]
    assert [found[0][index]["label"] for index in (0, 2, 3)] == ["positive", "negative", "positive"]
    with stdin_of(b""):
        assert main.main(["predict", str(classify_run), "-"]) == 0
    assert answers(capsys) == []


def test_answers_come_before_the_input_ends(classify_run: Path) -> None:
    command = [sys.executable, "-m", "bert_fast", "predict", str(classify_run), "-"]
    environment = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        for index, (text, label) in enumerate([("good film", "positive"), ("bad", "negative")]):
            process.stdin.write(f"{text}\n".encode())
            process.stdin.flush()
            row = json.loads(process.stdout.readline())
            assert (row["index"], row["label"]) == (index, label)
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_S) == 0


def test_a_reader_that_leaves(classify_run: Path, reviews: Path) -> None:
    command = [sys.executable, "-m", "bert_fast", "predict", str(classify_run), "-"]
    environment = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stdin.write(b"good\n")
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_S) == 141
        assert process.stderr.read() == b""


@pytest.mark.parametrize("task", ["ner", "qa", "choice"])
def test_rows_of_other_tasks(
    task: str, tiny_model: Path, words: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = {"ner": words / "train.conll", "qa": questions / "train.json", "choice": questions / "choices.jsonl"}[task]
    options = ["--output-dir", str(tmp_path / "run"), "--steps", "1", "--max-length", "40", "--quiet"]
    if task == "qa":
        options += ["--stride", "8"]
    assert main.main(["finetune", task, "--model", str(tiny_model), "--train", str(file), *options]) == 0
    capsys.readouterr()
    question = {"id": "7", "question": "who ?", "context": "John lives in Oslo ."}
    choice = {"sent1": "the film was", "sent2": ""} | {f"ending{index}": "good ." for index in range(4)}
    line = {"ner": "John lives in Oslo .", "qa": json.dumps(question), "choice": json.dumps(choice)}[task]
    with stdin_of(f"{line}\n{line.replace('7', '8')}\n".encode()):
        assert main.main(["predict", str(tmp_path / "run"), "-"]) == 0
    found = answers(capsys)
    assert len(found) == 2
    if task == "ner":
        assert found[0]["words"] == line.split() and len(found[0]["labels"]) == 5 and found[0] == found[1]
    elif task == "qa":
        assert found[0]["id"] == "7" and found[0]["answer"] in question["context"]
    else:
        assert [row["index"] for row in found] == [0, 1] and found[0]["choice"] == "good ."
    assert main.main(["predict", str(tmp_path / "run"), str(file), "-o", str(tmp_path / "out")]) == 0
    for path in capsys.readouterr().out.split():
        assert Path(path).stat().st_size > 0
    if task != "ner":
        with stdin_of(b'{"id": 1}\n[1]\n'):
            assert main.main(["predict", str(tmp_path / "run"), "-"]) == 1
        assert "-: line 2: expected a JSON object: got list" in capsys.readouterr().err


def test_pairs_and_wrong_lines(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.tsv").write_text("first\tsecond\tlabel\na\tb\t1\nb\ta\t0\n")
    options = ["--text", "first", "--text-pair", "second", "--steps", "1", "--output-dir", str(tmp_path / "run")]
    command = ["--model", str(tiny_model), "--train", str(tmp_path / "x.tsv"), "--quiet"]
    assert main.main(["finetune", "classify", *command, *options]) == 0
    capsys.readouterr()
    with stdin_of(b"good\tbad\n"):
        assert main.main(["predict", str(tmp_path / "run"), "-"]) == 0
    (row,) = answers(capsys)
    assert (row["text"], row["text_pair"]) == ("good", "bad")
    for content, message in (
        (b"a\tb\nalone\n", "-: line 2: expected two texts with a tab between them, got 1"),
        (b"a\tb\xff\n", "-: line 1: not UTF-8: byte 3 of the line is 0xff"),
    ):
        with stdin_of(content):
            assert main.main(["predict", str(tmp_path / "run"), "-"]) == 1
        assert message in capsys.readouterr().err
