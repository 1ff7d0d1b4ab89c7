"""Every argument of runs, tasks and recipes, given what it is not: the refusal names it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.data import ClassificationSource
from bert_fast.training import Predictions, Trainer, TrainingConfig
from bert_fast.training.optimization import learning_rate_schedule
from bert_fast.training.recipes import Settings, TrainedModel, make_config, plan_text, run
from bert_fast.training.recipes.settings import read_yaml
from bert_fast.training.reporting import MetricsLog, RunDirectory, default_observers, read_metrics, write_report
from bert_fast.training.tasks import (
    ClassificationTask,
    MultipleChoiceTask,
    PretrainingTask,
    QuestionAnsweringTask,
    TokenClassificationTask,
)

from ..data.corpora import make_tokenizer
from ..fuzzing.rules import objection
from .toy import ToySource, ToyTask, toy_config, toy_model

# None of these is any argument.
WRONG: tuple[Any, ...] = (
    *(object(), object, {"a", "b"}, b"abc", 1j, [[1], [1, 2]], np.array("abc"), torch.zeros(2, 2).to_sparse()),
    *(torch.zeros(2, 3, device="meta"), torch.zeros((), dtype=torch.int64, device="meta")),
)
Call = tuple[Callable[..., Any], dict[str, Any]]


def calls(folder: Path) -> Iterator[Call]:
    """Functions and methods, each with arguments that will do."""
    config, model = toy_config(folder / "run"), toy_model()
    yield TrainingConfig, dict(vars(config))
    yield Trainer, {"model": model, "task": ToyTask(ToySource(4)), "config": config, "tokenizer": None, "settings": {}}
    trainer = Trainer(model, ToyTask(ToySource(4), ToySource(2)), config, observers=())
    yield trainer.evaluate, {"source": ToySource(2)}
    yield trainer.predict, {"source": ToySource(2)}
    yield trainer.train, {"resume": "auto"}
    yield Predictions, {"lengths": [1, 2]}
    yield Predictions([1, 2]).add, {"indices": [0], "arrays": {"a": np.zeros(1)}}
    yield learning_rate_schedule, {"schedule": "linear", "learning_rate": 0.1, "num_steps": 3, "warmup": 0, "power": 1}
    for task in (ClassificationTask, MultipleChoiceTask, PretrainingTask, TokenClassificationTask):
        yield task, {"train": None, "valid": None}
    amounts = {"max_answer_length": 3, "n_best": 2, "null_threshold": 0.0, "may_abstain": None}
    yield QuestionAnsweringTask, {"train": None, "valid": None, **amounts}
    values = {"model": "m", "train": "t.tsv", "output_dir": "o"}
    yield Settings.of, {"task": "classify", "values": values}
    yield Settings.load, {"task": "classify", "file": None, "flags": values}
    yield read_yaml, {"file": "a.yaml"}
    yield plan_text, {"settings": None}
    yield run, {"settings": Settings.of("classify", values), "resume": "no", "quiet": True}
    yield make_config, {"size": "tiny", "vocab_size": 30}
    yield TrainedModel.load, {"path": str(folder), "changes": {"task": "classify"}, "precision": "fp32"}
    yield default_observers, {"output_dir": folder, "quiet": True}
    yield RunDirectory, {"output_dir": folder}
    yield MetricsLog, {"path": folder / "metrics.jsonl"}
    yield read_metrics, {"path": folder / "metrics.jsonl"}
    yield write_report, {"run_dir": folder}


def problems(function: Callable[..., Any], arguments: dict[str, Any], place: str) -> Iterator[str]:
    """What is wrong with how each argument of the wrong kind was refused."""
    for name in arguments:
        for value in WRONG:
            try:
                function(**arguments | {name: value})
            except Exception as error:
                problem = objection(error, [name, place])
                if problem is not None:
                    yield f"{name}={type(value).__name__}: {problem}"


def test_every_argument_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    for function, arguments in calls(tmp_path):
        found = list(problems(function, arguments, str(tmp_path)))
        assert not found, f"{function}: {found}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"betas": (0.9,)}, "betas: expected two numbers, got 1"),
        ({"betas": (0.9, 1.0)}, r"betas: expected numbers in \[0, 1\), got 0\.9, 1\.0"),
        ({"betas": (math.inf, 0.1)}, r"betas\[0\]: expected a finite number, got inf"),
        ({"steps": None, "epochs": 2**40}, "epochs: expected at most 2147483648, got 1099511627776"),
        ({"batch_size": 2**64}, "batch_size: expected an int of at most 64 bits"),
        ({"gradient_checkpointing": 1}, "gradient_checkpointing: expected a bool, got int"),
        ({"learning_rate": None}, "learning_rate: expected a number, got NoneType"),
        ({"optimizer": ["adamw"]}, "optimizer: expected one of adamw, lamb, got"),
        ({"output_dir": ""}, "output_dir: expected the name of a file, got ''"),
        ({"output_dir": "\ud800"}, "output_dir: expected the name of a file, got half of a surrogate pair"),
    ],
)
def test_configurations_that_no_run_can_have(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        replace(TrainingConfig(tmp_path, steps=2), **changes)


def test_numbers_of_any_kind_become_plain_ones(tmp_path: Path) -> None:
    numbers = {"learning_rate": np.float32(0.5), "eps": np.float64(0.25), "weight_decay": 2**60, "betas": [0, 0.5]}
    config = TrainingConfig(tmp_path, epochs=3, batch_size=np.int64(4), **numbers)  # type: ignore[arg-type]
    values = config.as_dict()
    kinds = {name: type(values[name]) for name in (*numbers, "epochs", "batch_size")}
    assert kinds == {**dict.fromkeys(numbers, float), "betas": list, "epochs": int, "batch_size": int}
    assert values["learning_rate"] == 0.5
    assert values["betas"] == [0.0, 0.5]


def test_a_task_for_other_examples() -> None:
    source = ClassificationSource.read([{"text": "w1", "label": label} for label in "ab"], make_tokenizer())
    with pytest.raises(TypeError, match="valid: expected a MultipleChoiceSource, got ClassificationSource"):
        MultipleChoiceTask(valid=source)  # type: ignore[arg-type]
