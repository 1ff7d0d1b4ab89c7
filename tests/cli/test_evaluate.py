"""`bert-fast evaluate`."""

import json
import shutil
from pathlib import Path

import pytest

from bert_fast.cli import main
from bert_fast.errors import CheckpointError
from bert_fast.training.recipes.inference import TrainedModel
from bert_fast.training.recipes.settings import SettingsError


def last_metrics(run: Path) -> dict[str, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["metrics"] for record in records if "metrics" in record][-1]


def test_what_training_found(classify_run: Path, reviews: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's directory, its model and the checkpoint of the best step agree with the metrics of training."""
    state = json.loads((classify_run / "checkpoints" / "step-00000040" / "state.json").read_text())
    best = classify_run / "checkpoints" / f"step-{state['progress']['best_step']:08d}"
    found = []
    for path in (classify_run, classify_run / "model", best):
        assert main.main(["evaluate", str(path), str(reviews / "valid.tsv"), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] == found[2]
    assert found[0]["accuracy"] == state["progress"]["best_value"] == 1.0
    assert main.main(["evaluate", str(classify_run), str(reviews / "valid.tsv")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(found[0])


def test_other_columns_and_labels(classify_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.csv"
    file.write_text('review,answer\n"the good, red film",positive\na bad film,negative\n')
    command = ["evaluate", str(classify_run), str(file), "--set", "text=review", "--set", "label=answer", "--json"]
    assert main.main(command) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == 1.0
    file.write_text("review,answer\na bad film,neutral\n")
    assert main.main(command) == 1
    message = f"{file}: line 2: expected one of the labels 'negative', 'positive', got 'neutral'"
    assert message in capsys.readouterr().err


def test_a_model_without_a_run(classify_run: Path, reviews: Path, tmp_path: Path) -> None:
    """As another program may have made it: weights, config and tokenizer only."""
    bare = tmp_path / "bare"
    shutil.copytree(classify_run / "model", bare)
    (bare / "bert_fast_task.json").unlink()
    with pytest.raises(SettingsError, match=r"holds no bert_fast_task\.json"):
        TrainedModel.load(bare)
    model = TrainedModel.load(bare, {"task": "classify", "text": "sentence"})
    assert model.labels == ["negative", "positive"]
    assert model.evaluate([str(reviews / "valid.tsv")])["accuracy"] == 1.0
    with pytest.raises(CheckpointError, match=r"expected a BertForQuestionAnswering; missing"):
        TrainedModel.load(bare, {"task": "qa", "max_length": 64})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "x.tsv"], "none: no such directory"),
        (["RUN", "none.tsv"], "No such file or directory: 'none.tsv'"),
        (["RUN", "x.tsv", "y.tsv"], "file: expected one, got 2"),
        (["RUN", "x.tsv", "--set", "txt=a"], "txt: no such setting; did you mean text?"),
        (["RUN", "x.tsv", "--set", "task=ner"], "task: expected classify, as the model was trained, got ner"),
        (["RUN", "x.tsv", "--precision", "fp16"], "precision: expected 'fp32' or 'bf16' on a CPU, got 'fp16'"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], message: str, classify_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(classify_run) if argument == "RUN" else argument for argument in arguments]
    assert main.main(["evaluate", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bert-fast evaluate: ") and message in error and error.count("\n") == 1


def test_damaged_settings(classify_run: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(classify_run / "model", model)
    for content in ("{", "[]"):
        (model / "bert_fast_task.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"bert_fast_task\.json: cannot be read or is damaged"):
            TrainedModel.load(tmp_path)


@pytest.mark.parametrize("change", ["text", "=x", "labels=[1"])
def test_wrong_changes_exit_with_2(change: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(["evaluate", "x", "y", "--set", change])
    assert exit_info.value.code == 2
