"""`bert-fast finetune`: what a run leaves, runs that go on, flags from files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bert_fast import BertForSequenceClassification, BertTokenizer
from bert_fast.cli import main
from bert_fast.cli.arguments import ModelArguments, make_parser, parsed
from bert_fast.training import Trainer, TrainingArguments
from bert_fast.training.tasks import TASKS, task_named
from tests.cli.conftest import error_of, finetune, flags

METRICS = {"classify": "accuracy", "ner": "f1", "qa": "exact_match", "choice": "accuracy"}


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


@pytest.mark.parametrize("task", TASKS)
def test_a_run_learns_and_leaves_what_transformers_leaves(task: str, runs: dict[str, Path]) -> None:
    run = runs[task]
    assert json.loads((run / "eval_results.json").read_text())[f"eval_{METRICS[task]}"] == 1.0
    for name in ("model.safetensors", "config.json", "tokenizer.json", "trainer_state.json", "curves.png"):
        assert (run / name).stat().st_size > 0, name


def test_the_model_knows_its_labels_and_words(runs: dict[str, Path], tiny_model: Path) -> None:
    model = BertForSequenceClassification.from_pretrained(runs["classify"])
    assert model.config.id2label == {0: "negative", 1: "positive"}
    tokenizer = BertTokenizer.from_pretrained(runs["classify"])
    assert tokenizer.get_vocab() == BertTokenizer.from_pretrained(tiny_model).get_vocab()
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(runs["classify"])
    assert theirs.config.id2label == {0: "negative", 1: "positive"}


def test_what_is_shown(tiny_model: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where stderr is no terminal: lines of the log and the last line, no bars, no notes."""
    output = tmp_path / "run"
    command = finetune("classify", tiny_model, reviews / "train.tsv", output, validation_file=reviews / "valid.tsv")
    assert main.main(command) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["{'loss'", "{'loss'"]
    assert lines[-1].startswith(f"{output}: 4 steps; eval_loss 0.") and "eval_accuracy 0." in lines[-1]
    assert all(line.startswith("{'") for line in lines[:-1])


def test_a_finished_run_stays_as_it_is(
    tiny_model: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the best model is not that of the last step."""
    command = finetune(
        "classify", tiny_model, reviews / "train.tsv", tmp_path, validation_file=reviews / "valid.tsv",
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
    )  # fmt: skip
    assert main.main(command) == 0
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    assert len(kept) == 3
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    best = max(entry["eval_accuracy"] for entry in state["log_history"] if "eval_accuracy" in entry)
    assert state["best_metric"] == best  # by the task's metric, not by the loss
    capsys.readouterr()
    assert main.main(command) == 0
    assert capsys.readouterr().err == f"bert-fast finetune: going on from {tmp_path / 'checkpoint-4'}\n"
    assert {path: path.read_bytes() for path in kept} == kept


def test_an_interrupted_run_goes_on_to_the_same_bits(
    tiny_model: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is one line and status 130."""

    def command(output: Path) -> list[str]:
        changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
        return finetune("classify", tiny_model, reviews / "train.tsv", output, **changes)

    step = Trainer.training_step
    made: list[int] = []
    interrupted_at: list[int] = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        made.append(1)
        if [len(made)] == interrupted_at:
            raise KeyboardInterrupt
        return step(*arguments, **options)

    monkeypatch.setattr(Trainer, "training_step", interrupted)
    for place, goes_on in ((1, "its start, as no checkpoint was written yet"), (4, tmp_path / "run/checkpoint-3")):
        made[:], interrupted_at[:] = [], [place]
        assert main.main(command(tmp_path / "run")) == 130
        expected = f"bert-fast finetune: interrupted; the same command goes on from {goes_on}\n"
        assert capsys.readouterr().err == expected
        assert not (tmp_path / "run" / "model.safetensors").exists()
    monkeypatch.undo()
    assert main.main(command(tmp_path / "run")) == 0
    assert main.main(command(tmp_path / "whole")) == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_regression(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"text": "good" if index % 2 else "bad", "label": index % 2 + 0.5} for index in range(20)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = finetune(
        "classify", tiny_model, tmp_path / "x.jsonl", tmp_path / "run", validation_file=tmp_path / "x.jsonl",
        do_regression=True, max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True,
    )  # fmt: skip
    assert main.main(command) == 0
    model = BertForSequenceClassification.from_pretrained(tmp_path / "run")
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["best_metric"] == max(entry.get("eval_pearson", -1.0) for entry in state["log_history"])


def test_flags_of_a_file_and_those_that_win(
    tiny_model: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        f"model_name_or_path: {tiny_model}\ntrain_file: {reviews / 'train.tsv'}\noutput_dir: out\nmax_steps: 3\n"
        "learning_rate: -1e-3\nper_device_train_batch_tokens: 100\nbf16_full_eval: false\nvalidation_file:\n"
        "lr_scheduler_type: constant\n"
    )
    command = ["finetune", "classify", "--config", "run.yaml", *flags(max_steps=2, max_seq_length=32, report_to="none")]
    assert main.main([*command, "--learning-rate", "3e-5"]) == 0
    state = json.loads(Path("out/trainer_state.json").read_text())
    assert state["global_step"] == 2 and state["train_batch_size"] == 8
    kept = torch.load("out/training_args.bin", weights_only=False)
    assert (kept.learning_rate, kept.per_device_train_batch_tokens, kept.lr_scheduler_type) == (3e-5, 100, "constant")


def test_flags_are_those_of_transformers() -> None:
    """All of them, also those that --help does not show."""
    kind = task_named("classify")
    parser = make_parser("finetune classify", "", (ModelArguments, kind.Arguments, TrainingArguments))
    argv = flags(model_name_or_path="m", output_dir="out", adam_beta2=0.9, report_to=["none"])
    model, data, arguments = parsed(parser, [*argv, "--bf16_full_eval", "--dataloader-drop-last", "--fp16", "False"])
    assert (model.model_name_or_path, data.text_column_name, arguments.adam_beta2) == ("m", "text", 0.9)
    assert (arguments.bf16_full_eval, arguments.dataloader_drop_last, arguments.fp16) == (True, True, False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "run.yaml: No such file or directory"),
        ("a: b: c", "run.yaml: is not YAML: mapping values are not allowed here"),
        ("[" * 5000, "run.yaml: is not YAML: "),
        ("- 1", "run.yaml: expected lines of the form name: value, got list"),
        ("", "run.yaml: expected lines of the form name: value, got NoneType"),
        ("1: 2", "run.yaml: expected lines of the form name: value"),
        ("learing_rate: 1", "run.yaml: learing_rate: no such flag; did you mean learning_rate?"),
        ("config: other.yaml", "run.yaml: config: no such flag"),
        ("learning_rate: [1, 2]", "run.yaml: learning_rate: expected one value, got [1, 2]"),
        ("train_file: {a: 1}", "run.yaml: train_file: expected one value, got {'a': 1}"),
        ("label_names: [[a], b]", "run.yaml: label_names: expected one value, got [['a'], 'b']"),
    ],
)
def test_files_of_flags_that_cannot_be_used(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("run.yaml").write_text(content)
    assert error_of(["finetune", "classify", "--config", "run.yaml"], capsys).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: --model_name_or_path"),
        (["--model_name_or_path", "m"], "the following arguments are required: --train_file"),
        (["--learning_rate", "fast"], "invalid float value: 'fast'"),
        (["--eval_strategy", "x"], "invalid choice: 'x'"),
        (["--model_name_or_path", "m", "--learing_rate", "1"], "no flag --learing_rate; did you mean --learning_rate?"),
        (["--model_name_or_path", "m", "--learning", "1"], "no flag --learning; did you mean --learning_rate?"),
        (["--train_fil", "x"], "no flag --train_fil; did you mean --train_file?"),  # before what is missing
        (["--model_name_or_path", "m", "\x1b[2J"], "unrecognized arguments: \\u001b[2J"),
        (["--config"], "expected one argument"),
    ],
)
def test_wrong_flags_exit_with_2(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main.main(["finetune", "ner", *options])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: bert-fast finetune ner ") and message in error
    assert not list(tmp_path.iterdir())


def test_the_tasks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["finetune", "--help"]) == 0 and main.main(["finetune"]) == 2
    assert capsys.readouterr().out.count(", ".join(TASKS)) == 2
    assert error_of(["finetune", "translate"], capsys) == f"task: expected one of {', '.join(TASKS)}, got 'translate'"


def test_checkpoints_of_a_killed_run(
    tiny_model: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was not written to its end is passed over."""
    command = finetune(
        "classify", tiny_model, reviews / "train.tsv", tmp_path / "run", save_strategy="steps", save_steps=1
    )
    assert main.main(command) == 0
    expected = weights(tmp_path / "run")
    (tmp_path / "run" / "checkpoint-4" / "trainer_state.json").write_text('{"epoch": 0.4')
    (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").unlink()
    (tmp_path / "run" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoint-1")
    capsys.readouterr()
    assert main.main(command) == 0
    assert capsys.readouterr().err == f"bert-fast finetune: going on from {tmp_path / 'run' / 'checkpoint-2'}\n"
    assert weights(tmp_path / "run") == expected


def test_another_run_does_not_go_on(
    tiny_model: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other data in the folder of a run: no model of the one with labels of the other is left."""
    saving = {"save_strategy": "steps", "save_steps": 4}
    assert main.main(finetune("classify", tiny_model, reviews / "train.tsv", tmp_path / "run", **saving)) == 0
    before = (tmp_path / "run" / "config.json").read_bytes()
    other = tmp_path / "other.tsv"
    other.write_text((reviews / "train.tsv").read_text().replace("positive", "a").replace("negative", "b"))
    capsys.readouterr()
    assert main.main(finetune("classify", tiny_model, other, tmp_path / "run", **saving)) == 1
    assert "is of another run: train_dataset: " in capsys.readouterr().err
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_a_metric_that_is_better_when_lower(tiny_model: Path, tmp_path: Path) -> None:
    """transformers takes all but losses for better when they are higher."""
    rows = "".join(f"{'a ' * (1 + index % 7)}\t{index % 7}.5\n" for index in range(40))
    (tmp_path / "x.tsv").write_text("text\tlabel\n" + rows)
    command = finetune(
        "classify", tiny_model, tmp_path / "x.tsv", tmp_path / "run", do_regression=True,
        validation_file=tmp_path / "x.tsv", eval_strategy="epoch", save_strategy="epoch", num_train_epochs=3,
        max_steps=-1, learning_rate=1e-3, load_best_model_at_end=True, metric_for_best_model="mse",
    )  # fmt: skip
    assert main.main(command) == 0
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    found = [entry["eval_mse"] for entry in state["log_history"] if "eval_mse" in entry]
    assert state["best_metric"] == min(found[:3]) < max(found[:3])
