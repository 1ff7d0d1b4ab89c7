"""Files made to mislead: nothing in them commands the terminal, and none of them makes a command endless."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from bert_fast.cli.main import main
from bert_fast.training.recipes.settings import SettingsError, read_yaml
from bert_fast.training.reporting.progress import ProgressLine

pytest.importorskip("accelerate")
pytest.importorskip("yaml")

RED = "\x1b[31mred\x1b]0;title\x07"
NESTED = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A file whose name, texts and labels hold escape sequences."""
    file = tmp_path / "\x1b[2Jtrain.tsv"
    rows = [f"the film{RED}\t{label}" for label in (f"good{RED}", f"bad{RED}") * 20]
    file.write_text("\n".join(["sentence\tlabel", *rows]) + "\n", newline="\n")
    return file


def command(model: Path, train: Path, output: Path, *more: str) -> list[str]:
    options = ["--model", str(model), "--train", str(train), "--output-dir", str(output), "--text", "sentence"]
    return ["finetune", "classify", *options, "--steps", "2", *more]


def test_nothing_of_it_reaches_the_terminal(
    hostile: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "\x1b[1mrun"
    (tmp_path / "other.tsv").write_text(f"sentence\tlabel\na\tx{RED}\n")
    statuses = [
        main(command(tiny_model, hostile, run, "--dry-run")),
        main(command(tiny_model, hostile, run)),
        main(command(tiny_model, hostile, run, "--valid", str(tmp_path / "other.tsv"))),
        main(command(tiny_model, tmp_path / RED, run)),
        main(["evaluate", str(run), str(tmp_path / "other.tsv")]),
        main(["predict", str(run), str(hostile)]),
        main(["predict", str(run), str(hostile), "-o", str(tmp_path / RED)]),
        main(["verify", str(run), str(hostile)]),
        main(["report", str(tmp_path / RED)]),
    ]
    assert statuses == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    found = capsys.readouterr()
    assert "\x1b" not in found.out + found.err and "\x07" not in found.out + found.err
    assert "\\u001b[31mred" in found.out and "\\u001b[31mred" in found.err
    answers = [json.loads(line) for line in found.out.splitlines() if line.startswith("{")]
    assert {answer["label"] for answer in answers} <= {f"good{RED}", f"bad{RED}"}


def test_a_name_that_is_not_utf_8(tiny_model: Path, reviews: Path, tmp_path: Path) -> None:
    run = tmp_path / "\udcffrun"
    assert main([*command(tiny_model, reviews / "train.tsv", run), "--quiet"]) == 0
    assert json.loads((run / "model" / "bert_fast_task.json").read_text())["output_dir"] == str(run)


@pytest.mark.parametrize("output", ["", "/", "."])
def test_answers_that_no_file_can_hold(
    output: str, classify_run: Path, reviews: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(classify_run), str(reviews / "valid.tsv"), "-o", output]) == 1
    assert "path: expected the name of a file, got" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--betas", "inf", "0.1"], ["--betas", "1", "0.1"], ["--config", ""]])
def test_settings_that_no_run_can_have(
    options: list[str], tiny_model: Path, hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(tiny_model, hostile, tmp_path / "run"), *options]) == 1
    assert capsys.readouterr().err.startswith(("bert-fast finetune: betas", "bert-fast finetune: file: expected"))


def test_tokenizers_whose_files_hold_something_else(
    tiny_model: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    values = json.loads((model / "tokenizer_config.json").read_text())
    next(iter(values["added_tokens_decoder"].values()))["lstrip"] = "yes"
    (model / "tokenizer_config.json").write_text(json.dumps(values))
    (tmp_path / "a.txt").write_text("the film\n")
    assert main(["tokenize", str(tmp_path / "a.txt"), "-o", str(tmp_path / "s"), "--tokenizer", str(model)]) == 1
    assert main(command(model, reviews / "train.tsv", tmp_path / "run")) == 1
    errors = capsys.readouterr().err.splitlines()
    assert all("tokenizer_config.json: added_tokens_decoder" in line for line in errors) and len(errors) == 2


def test_the_line_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressLine().note(f"going on from {RED}")
    assert capsys.readouterr().err == "going on from \\u001b[31mred\\u001b]0;title\\u0007\n"


def test_gaps_in_the_names_of_labels(classify_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(classify_run / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["id2label"], config["label2id"] = {"0": "negative", "2": "positive"}, {"negative": 0, "positive": 2}
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "x.tsv").write_text("sentence\nfine\n")
    assert main(["predict", str(model), str(tmp_path / "x.tsv")]) == 1
    error = capsys.readouterr().err
    assert "config.json: " in error and "id2label" in error


@pytest.mark.parametrize("content", [NESTED, '{"task": ' + NESTED + "}"], ids=["all of it", "a value"])
def test_a_nested_task_file(
    classify_run: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(classify_run / "model", tmp_path / "model")
    (model / "bert_fast_task.json").write_text(content)
    (tmp_path / "x.tsv").write_text("sentence\nfine\n")
    assert main(["predict", str(model), str(tmp_path / "x.tsv")]) == 1
    assert "bert_fast_task.json: cannot be read or is damaged" in capsys.readouterr().err


def test_a_nested_record_of_a_run(classify_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(classify_run, tmp_path / "run")
    (run / "metrics.jsonl").write_text(NESTED + "\n{}\n")
    assert main(["report", str(run)]) == 1
    assert "metrics.jsonl: line 1: " in capsys.readouterr().err
    (run / "run.json").write_text(NESTED)
    assert main(["report", str(run)]) == 1
    assert "run.json: cannot be read: " in capsys.readouterr().err


STEPS = list(pairwise("abcdefghij"))
BOMB = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [*{old}, *{old}]\n" for old, new in STEPS)
MERGED = "a: &a {x: 1}\n" + "".join(f"{new}: &{new} {{<<: [*{old}, *{old}]}}\n" for old, new in STEPS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (NESTED, "line 1: nested too deeply"),
        ("train: " + "{a: " * 5000, "line 1: nested too deeply"),
        ("- " * 5000, "line 1: nested too deeply"),
        (BOMB, "line 2: an alias within a list"),
        (MERGED, "line 2: an alias within a list"),
        ("train: &a [*a]", "an alias within a list"),
        ("steps: *none", "is not YAML"),
    ],
    ids=["lists", "mappings", "dashes", "aliases", "merged", "itself", "no anchor"],
)
def test_settings_that_would_have_no_end(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(SettingsError, match=rf"run\.yaml: .*{message}"):
        read_yaml(tmp_path / "run.yaml")


def test_names_for_values_stay(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: &files [a, b]\nvalid: *files\nsteps: &n 3\nlog_every: *n\n")
    expected = {"train": ["a", "b"], "valid": ["a", "b"], "steps": 3, "log_every": 3}
    assert read_yaml(tmp_path / "run.yaml") == expected
