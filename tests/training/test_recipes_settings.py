"""Settings of a run: YAML, flags, and what they may be."""

from pathlib import Path
from typing import Any

import pytest

from bert_fast.training.config import TrainingConfig
from bert_fast.training.recipes.settings import (
    MISSING,
    TASKS,
    ModelSettings,
    Settings,
    SettingsError,
    fields_of,
    read_yaml,
    settings_fields,
)

NEEDED: dict[str, Any] = {"model": "m", "train": "t", "output_dir": "o"}


@pytest.mark.parametrize("task", TASKS)
def test_names_are_those_of_one_part_and_each_says_what_it_means(task: str) -> None:
    parts = [ModelSettings, TASKS[task], TrainingConfig]
    names = [name for part in parts for name in fields_of(part)]
    assert len(names) == len(set(names)) == len(settings_fields(task))
    silent = [name for name, field in settings_fields(task).items() if not field.help and name != "output_dir"]
    assert not silent
    assert {name for name, field in settings_fields(task).items() if field.default is MISSING} == NEEDED.keys()


@pytest.mark.parametrize("task", TASKS)
def test_as_dict_makes_the_same_settings(task: str, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    more = {"steps": 10} if task == "pretrain" else {}
    settings = Settings.of(task, NEEDED | more | {"learning_rate": "3e-5", "betas": [0.8, "0.9"], "warmup": 0.25})
    assert settings.training.learning_rate == 3e-5 and settings.training.betas == (0.8, 0.9)
    values = settings.as_dict()
    assert values.pop("task") == task
    assert Settings.of(task, values) == settings
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(settings.as_dict()))
    assert Settings.load(task, tmp_path / "x.yaml", {}) == settings


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "run.yaml"
    file.write_text("\ufeffmodel: m\ntrain: t\noutput_dir: o\nepochs: 2\nbatch_size: 8\nlearning_rate: 3e-5\n", "utf-8")
    plain = Settings.load("ner", file, {})
    assert (plain.training.epochs, plain.training.batch_size, plain.training.batch_tokens) == (2, 8, None)
    changed = Settings.load("ner", file, {"steps": 7, "learning_rate": 1e-3, "batch_tokens": 100})
    assert (changed.training.epochs, changed.training.steps) == (None, 7)
    assert (changed.training.batch_size, changed.training.batch_tokens) == (8, 100)
    assert changed.training.learning_rate == 1e-3


def test_defaults_of_a_task_give_way() -> None:
    default = Settings.of("pretrain", NEEDED | {"steps": 1}).training
    assert (default.batch_size, default.batch_tokens) == (None, 16384)
    sized = Settings.of("pretrain", NEEDED | {"steps": 1, "batch_size": 4}).training
    assert (sized.batch_size, sized.batch_tokens) == (4, None)
    tuned = Settings.of("qa", NEEDED).training
    assert (tuned.epochs, tuned.steps, tuned.batch_size, tuned.warmup) == (3, None, 32, 0.1)
    assert Settings.of("qa", NEEDED | {"steps": 5}).training.epochs is None
    assert Settings.of("qa", NEEDED | {"batch_tokens": 500}).training.batch_size is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learing_rate": 1}, "learing_rate: no such setting; did you mean learning_rate?"),
        ({"zzzz": 1}, "zzzz: no such setting; there are batch_size"),
        ({"steps": 1.5}, "steps: expected a whole number, got 1.5"),
        ({"steps": True}, "steps: expected a whole number, got True"),
        ({"learning_rate": "fast"}, "learning_rate: expected a number, got 'fast'"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a number above 0, got nan"),
        ({"seed": None}, "seed: expected a whole number, got nothing"),
        ({"optimizer": "sgd"}, "optimizer: expected one of adamw, lamb, got 'sgd'"),
        ({"cased": "yes"}, "cased: expected true or false, got 'yes'"),
        ({"text": ["a"]}, "text: expected text, got ['a']"),
        ({"text": True}, "text: expected text, got True"),
        ({"betas": [0.9, "x"]}, "betas: expected a list, each a number, got 'x'"),
        ({"betas": [0.9]}, "betas: expected 2 values, got 1"),
        ({"labels": []}, "labels: expected some values, got 0"),
        ({"output_dir": 3}, "output_dir: expected a path, got 3"),
        ({"steps": 1, "epochs": 1}, "epochs, steps: expected one of them"),
        ({"valid_share": 1}, "valid_share: expected a share between 0 and 1"),
        ({"valid_share": 0.5, "valid": "v"}, "valid_share: expected a share between 0 and 1, and no valid"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.of("classify", NEEDED | values)
    assert str(caught.value).startswith(message)


def test_missing_and_contradicting() -> None:
    with pytest.raises(SettingsError, match="model, train, output_dir: missing"):
        Settings.of("ner", {})
    with pytest.raises(SettingsError, match="task: expected one of pretrain, classify, ner, qa, choice, got 'x'"):
        Settings.of("x", {})
    with pytest.raises(SettingsError, match="epochs, steps: expected one of them, got epochs=None, steps=None"):
        Settings.of("pretrain", NEEDED)
    with pytest.raises(SettingsError, match="long_length: expected more than max_length=128, got 128"):
        Settings.of("pretrain", NEEDED | {"steps": 9, "long_length": 128})


def test_text_that_says_nothing_is_none() -> None:
    fields = settings_fields("classify")
    assert fields["max_grad_norm"].read("none") is None and fields["valid"].read("") is None
    assert fields["text_pair"].read("none") == "none"  # a column may be called so
    assert fields["label"].read(0) == "0" and fields["labels"].read("a") == ("a",)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a: [1", "is not YAML"), (b"- a\n- b\n", "expected lines of the form name: value, got list"),
     (b"a: \xff", "is not YAML"), (b"1: a", "expected lines of the form name: value"), (b"x", "got str")],
)  # fmt: skip
def test_files_that_hold_no_settings(content: bytes, message: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(SettingsError, match=message) as caught:
        read_yaml(tmp_path / "x.yaml")
    assert str(caught.value).startswith(str(tmp_path / "x.yaml"))
    assert "\n" not in str(caught.value)


def test_an_empty_file_holds_none(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "x.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "x.yaml") == {}
