"""`bert-fast finetune`."""

import json
import os
from pathlib import Path

import pytest

from bert_fast import BertForSequenceClassification, BertTokenizer
from bert_fast.cli import main
from bert_fast.training.tasks.classification import ClassificationTask


def arguments(model: Path, train: Path, output: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--train", str(train), "--output-dir", str(output), *more]


def test_a_run_learns_and_leaves_a_model_that_knows_its_labels(classify_run: Path, tiny_model: Path) -> None:
    records = [json.loads(line) for line in (classify_run / "metrics.jsonl").read_text().splitlines()]
    best = max(record["metrics"]["accuracy"] for record in records if "metrics" in record)
    assert best == 1.0
    model = BertForSequenceClassification.from_pretrained(classify_run / "model")
    assert model.config.id2label == {0: "negative", 1: "positive"}
    tokenizer = BertTokenizer.from_pretrained(classify_run / "model")
    assert tokenizer.get_vocab() == BertTokenizer.from_pretrained(tiny_model).get_vocab()
    rows = (classify_run / "predictions" / "valid.tsv").read_text().splitlines()
    assert len(rows) == 41 and rows[0].split("\t")[:3] == ["index", "label", "gold"]
    assert all(row.split("\t")[1] == row.split("\t")[2] for row in rows[1:])
    for name in ("config.yaml", "run.json", "README.txt", "checkpoints/step-00000040"):
        assert (classify_run / name).exists(), name


def test_the_stored_settings_repeat_the_run(
    classify_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bits in another directory, by config.yaml alone."""
    command = ["finetune", "classify", "--config", str(classify_run / "config.yaml"), "--quiet"]
    assert main.main([*command, "--output-dir", str(tmp_path / "again")]) == 0
    captured = capsys.readouterr()
    assert (
        captured.out.startswith(f"{tmp_path / 'again'}: finished after 40 steps; model in ")
        and captured.out.count("\n") == 1
    )
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (classify_run, tmp_path / "again")]
    assert weights[0] == weights[1]


def test_the_last_line_is_of_the_model_that_is_kept(
    classify_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its step, with its metrics, also where nothing is left to do."""
    values = iter([0.25, 0.75, 0.5])
    monkeypatch.setattr(ClassificationTask, "score", lambda *_: {"accuracy": next(values)})
    command = ["finetune", "classify", "--config", str(classify_run / "config.yaml"), "--quiet"]
    command += ["--output-dir", str(tmp_path), "--steps", "3", "--eval-every", "1"]
    for _ in range(2):
        assert main.main(command) == 0
        said = capsys.readouterr().out
        assert said.startswith(
            f"{tmp_path}: finished after 3 steps; model in {tmp_path / 'model'}, that of step 2: loss "
        )
        assert said.endswith(", accuracy 0.75\n")


def test_an_output_that_may_not_be_written(
    classify_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the examples are read."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    command = ["finetune", "classify", "--config", str(classify_run / "config.yaml"), "--train", "none.tsv"]
    for more in ([], ["--dry-run"]):
        assert main.main([*command, "--output-dir", str(tmp_path / "new"), *more]) == 1
        expected = f"output_dir: {tmp_path / 'new'} cannot be made or written: {tmp_path} may not be written\n"
        assert capsys.readouterr().err.endswith(expected)


def test_classes_are_named_before_the_first_step(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": "good", "label": label} for label in ("pos", "neg", "Pos", "neg ")]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["finetune", "classify", *arguments(tiny_model, tmp_path / "x.jsonl", tmp_path / "out", "--steps", "1")]
    assert main.main([*command, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "classes      0 'Pos', 1 'neg', 2 'neg ', 3 'pos'\n" in said
    assert said.count("note         ") == 2
    with pytest.warns(UserWarning, match="labels: ") as warned:
        assert main.main(command) == 0
    alike = [str(one.message) for one in warned]
    assert alike[0].startswith("labels: 'neg' (class 1) and 'neg ' (class 2) differ only in case, spaces")
    assert alike[1].startswith("labels: 'Pos' (class 0) and 'pos' (class 3) differ only in case, spaces")
    said = capsys.readouterr().err
    assert said.index("classes: 0 'Pos', 1 'neg', 2 'neg ', 3 'pos'") < said.index("step 1/1")
    assert json.loads((tmp_path / "out/run.json").read_text())["plan"]["classes"] == ["Pos", "neg", "neg ", "pos"]


def test_ratings_as_classes(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A TSV file holds texts, so numbers in it become classes; a note says so."""
    (tmp_path / "x.tsv").write_text("text\tlabel\ngood\t4.5\nbad\t1\n")
    command = ["finetune", "classify", *arguments(tiny_model, tmp_path / "x.tsv", tmp_path / "out", "--dry-run")]
    assert main.main(command) == 0
    assert "labels: the names of all 2 classes are numbers, such as '4.5'; with regression" in capsys.readouterr().out
    assert main.main([*command, "--regression"]) == 0
    said = capsys.readouterr().out
    assert "\nclasses " not in said and "\nnote " not in said


def test_resume(classify_run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["finetune", "classify", "--config", str(classify_run / "config.yaml"), "--quiet"]
    assert main.main([*command, "--resume", "must"]) == 0  # nothing is left to do
    assert "finished after 40 steps" in capsys.readouterr().out
    assert main.main([*command, "--resume", "never"]) == 1
    assert "holds checkpoints of a run already" in capsys.readouterr().err
    assert main.main([*command, "--learning-rate", "1e-3"]) == 1
    assert "learning_rate is 0.001 here and 0.01 there" in capsys.readouterr().err
    assert main.main([*command, "--output-dir", str(tmp_path / "new"), "--resume", "must"]) == 1
    assert "expected a checkpoint to go on from, found none" in capsys.readouterr().err


def test_yaml_and_flags(tiny_model: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        f"task: classify\nmodel: {tiny_model}\ntrain: {reviews / 'train.tsv'}\ntext: sentence\nlearning_rate: 3e-5\n"
        "valid_share: 0.25\nepochs: 3\noutput_dir: out\nbatch_tokens: 100\n"
    )
    assert main.main(["finetune", "classify", "--config", "run.yaml", "--steps", "2", "--quiet"]) == 0
    stored = json.loads(Path("out/model/bert_fast_task.json").read_text())
    assert (stored["steps"], stored["epochs"], stored["learning_rate"]) == (2, None, 3e-5)
    assert (stored["batch_size"], stored["batch_tokens"]) == (None, 100)
    plan = json.loads(Path("out/run.json").read_text())["plan"]
    assert (plan["num_examples"], plan["num_valid_examples"]) == (120, 40)


def test_regression(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"text": "good" if index % 2 else "bad", "label": index % 2 + 0.5} for index in range(20)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--regression", "--steps", "2", "--quiet", "--valid", str(tmp_path / "x.jsonl"))
    command = arguments(tiny_model, tmp_path / "x.jsonl", tmp_path / "out", *options)
    assert main.main(["finetune", "classify", *command]) == 0
    model = BertForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")


@pytest.mark.parametrize("task", ["ner", "qa", "choice"])
def test_other_tasks_learn(
    task: str, tiny_model: Path, words: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = {"ner": words / "train.conll", "qa": questions / "train.json", "choice": questions / "choices.jsonl"}[task]
    options = ("--valid", str(file), "--steps", "40", "--learning-rate", "1e-2", "--max-length", "48", "--quiet")
    more = ("--stride", "8") if task == "qa" else ()
    assert main.main(["finetune", task, *arguments(tiny_model, file, tmp_path / "out", *options, *more)]) == 0
    metric = {"ner": "f1", "qa": "exact_match", "choice": "accuracy"}[task]
    evaluate = ["evaluate", str(tmp_path / "out"), str(file), "--json"]
    capsys.readouterr()
    assert main.main(evaluate) == 0
    found = json.loads(capsys.readouterr().out)[metric]
    assert found == 1.0
    assert list((tmp_path / "out" / "predictions").iterdir())


def test_dry_run_writes_nothing(
    tiny_model: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = arguments(tiny_model, reviews / "train.tsv", Path("out"), "--text", "sentence", "--dry-run")
    assert main.main(["finetune", "classify", *command, "--epochs", "2", "--valid-share", "0.5"]) == 0
    captured = capsys.readouterr()
    assert "examples     80 to train on, 80 to judge by (by accuracy)" in captured.out
    assert "steps        6; 3 are an epoch, 1 batches a step" in captured.out
    assert captured.out.count("  [CLS] ") == 4 and " -> positive" in captured.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train", "none.tsv"], "No such file or directory: 'none.tsv'"),
        (["--text", "sentense"], "expected a column 'sentense', got 'sentence', 'label'"),
        (["--model", "none"], "there is none beside model=none"),
        (["--max-length", "129"], "max_length: expected at most the model's 128 positions, got 129"),
        (["--valid-share", "1.5"], "valid_share: expected a share between 0 and 1, and no valid, got 1.5"),
        (["--labels", "good", "bad"], "expected one of the labels 'good', 'bad', got 'negative'"),
        (["--learning-rate", "-1"], "learning_rate: expected a number above 0, got -1"),
        (["--epochs", "1", "--steps", "1"], "epochs, steps: expected one of them, got epochs=1.0, steps=1"),
        (["--batch-tokens", "4"], "batch_tokens: expected room for the longest example, 11 tokens, got 4"),
        (["--output-dir", "file"], "output_dir: file cannot be made or written: file is no directory"),
        (["--output-dir", "file/below"], "output_dir: file/below cannot be made or written: file is no directory"),
        (["--output-dir", "half"], "output_dir: half cannot be made or written: half/model is no directory"),
        (["--config", "none.yaml"], "none.yaml: No such file or directory"),
        (["--config", "bad.yaml"], "bad.yaml: learing_rate: no such setting; did you mean learning_rate?"),
        (["--config", "ner.yaml"], "ner.yaml: task: expected classify, got ner"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    options: list[str],
    message: str,
    tiny_model: Path,
    reviews: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("learing_rate: 1")
    Path("ner.yaml").write_text("task: ner")
    Path("file").write_text("")
    Path("half").mkdir()
    Path("half", "model").write_text("")
    command = arguments(tiny_model, reviews / "train.tsv", Path("out"), "--text", "sentence", "--quiet", *options)
    assert main.main(["finetune", "classify", *command]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bert-fast finetune: ") and message in error and error.count("\n") == 1
    assert not Path("out", "model").exists()


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--learning-rate", "fast"],
        ["--steps", "1.5"],
        ["--steps", "1_000"],
        ["--steps", "1e3"],
        ["--steps", "٣"],
        ["--learning-rate", "1_0e-5"],
        ["--optimizer", "sgd"],
        ["--no-such-flag"],
        ["--resume", "x"],
    ],
)
def test_wrong_arguments(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if not options:  # settings that are missing may be in a file: no error of usage
        assert main.main(["finetune", "ner"]) == 1
        assert "model, train, output_dir: missing" in capsys.readouterr().err
        return
    with pytest.raises(SystemExit) as exit_info:
        main.main(["finetune", "ner", *options])
    assert exit_info.value.code == 2


@pytest.mark.parametrize(
    "command", [["pretrain"], *(["finetune", task] for task in ("classify", "ner", "qa", "choice"))]
)
def test_help_says_what_every_flag_means(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main([*command, "--help"])
    assert exit_info.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  --"):
            assert len(line.split("  ")) > 2 or after.startswith(" " * 8), f"no help: {line}"
