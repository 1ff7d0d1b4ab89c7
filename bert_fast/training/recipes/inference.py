"""A trained model with its task: to judge it by labelled examples, and to ask it about others."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_fast.checks import check_choice
from bert_fast.errors import CheckpointError
from bert_fast.files import path_name
from bert_fast.models import BertConfig, BertPreTrainedModel
from bert_fast.tokenization import Tokenizer, load_tokenizer
from bert_fast.training.config import PRECISIONS, TrainingConfig
from bert_fast.training.distributed import Processes
from bert_fast.training.evaluation import run_over
from bert_fast.training.loop import TASK_FILE
from bert_fast.training.recipes.build import load_model, settings_at_fault
from bert_fast.training.recipes.settings import TASKS, Settings, SettingsError
from bert_fast.training.task import Predictions

__all__ = ["TrainedModel"]


@dataclass(frozen=True)
class TrainedModel:
    """What a run left behind.

    Attributes:
        settings: of the run.
        tokenizer, model: as saved; the model is in evaluation mode, on the device that `accelerate` chooses.
        labels: of classes or tags, in the order of the model's outputs; None for other tasks.
        processes: this process, or those that share the work.
    """

    settings: Settings
    tokenizer: Tokenizer
    model: BertPreTrainedModel
    labels: list[str] | None
    processes: Processes

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], changes: Mapping[str, Any] | None = None, precision: str = "fp32"
    ) -> "TrainedModel":
        """The model of a run, or of any checkpoint directory.

        Args:
            path: the run's directory, its model/, a checkpoint of it; or another model, whose task is in `changes`.
            changes: settings that are not as in training: names of columns, max_length; as `Settings.of` reads them.
            precision: "fp32", "bf16" or "fp16".

        Raises:
            SettingsError: a wrong name or value; nothing says what the model's task is.
            CheckpointError: files are missing or broken.
        """
        if changes is not None and not isinstance(changes, Mapping):
            raise TypeError(f"changes: expected a mapping of names to values, got {type(changes).__name__}")
        with settings_at_fault():
            directory = Path(path_name("path", path))
            check_choice("precision", precision, PRECISIONS)
        if (directory / "model" / TASK_FILE).is_file():
            directory = directory / "model"
        settings = _settings(directory, dict(changes or {}), precision)
        data = settings.data
        with settings_at_fault():
            tokenizer = load_tokenizer(directory)
            processes = Processes(settings.training)
        model = load_model(data.model_class, directory, tokenizer, data.max_length, may_lack_head=False)
        labels = data.label_names(model.config.id2label, directory / "config.json")
        return cls(settings, tokenizer, processes.place(model).eval(), labels, processes)

    def evaluate(self, files: Sequence[str]) -> dict[str, float]:
        """Loss and metrics over labelled examples.

        Args:
            files: one file of examples as those of the training; of pre-training, text files or one token store.

        Raises:
            SettingsError, OSError, SourceError, StoreError: see `build`.
        """
        data, seed = self.settings.data, self.settings.training.seed
        with settings_at_fault():
            source = data.labelled_source(files, self.tokenizer, seed=seed, labels=self.labels)
        task = data.make_task(None, source)
        predictions, losses = self._run(task, source)
        return self.processes.on_main(lambda: losses | task.score(source, predictions))

    def read(self, examples: Any, *, is_labelled: bool = False) -> Any:
        """Examples of a file, or of a list of mappings, to be asked about; not of pre-training.

        Raises:
            SettingsError, OSError, SourceError: see `build`.
        """
        with settings_at_fault():
            return self.settings.data.read(examples, self.tokenizer, labels=self.labels, is_labelled=is_labelled)

    def answers(self, source: Any) -> Iterator[dict[str, Any]]:
        """What the model says, in the order of the examples: dictionaries for JSON, as the task's `rows` makes them.

        Args:
            source: what `read` gave.
        """
        task: Any = self.settings.data.make_task(None, source)
        yield from task.rows(source, self._run(task, source)[0])

    def write_answers(self, source: Any, path: str | os.PathLike[str]) -> list[Path]:
        """Writes what the model says, as the task's `write_predictions`; returns the files.

        Args:
            source: what `read` gave.
            path: without an ending.

        Raises:
            SettingsError: no file can have this name.
        """
        with settings_at_fault():
            place = Path(path_name("path", path))
            if not place.name:
                raise SettingsError(f"path: expected the name of a file, got {os.fspath(path)!r}")
        task = self.settings.data.make_task(None, source)
        place.parent.mkdir(parents=True, exist_ok=True)  # first: it may fail
        predictions = self._run(task, source)[0]
        return self.processes.on_main(lambda: task.write_predictions(place, source, predictions))

    def _run(self, task: Any, source: Any) -> tuple[Predictions, dict[str, float]]:
        return run_over(task, self.model, source, self.processes, self.settings.training.eval_batch_tokens)


def _settings(directory: Path, changes: dict[str, Any], precision: str) -> Settings:
    """Those beside the model, with changes; or those of `changes` alone."""
    stored: dict[str, Any] = {}
    file = directory / TASK_FILE
    if file.is_file():
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(stored, dict):
                raise ValueError(f"expected an object, got {type(stored).__name__}")
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: cannot be read or is damaged: {error}") from None
        if changes.get("task", stored.get("task")) != stored.get("task"):
            raise SettingsError(f"task: expected {stored.get('task')}, as the model was trained, got {changes['task']}")
    elif not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    elif "task" not in changes:
        raise SettingsError(
            f"{directory}: holds no {TASK_FILE}, which a run leaves beside its model; say what the model's task is by "
            "the setting task (classify, ner, qa, choice), and how examples are read by those of the task"
        )
    else:
        # What only training needs.
        stored = {"train": "none", "output_dir": str(directory), "epochs": 1}
        config = BertConfig.from_pretrained(directory)
        if str(changes["task"]) in TASKS:
            stored |= TASKS[str(changes["task"])].of_model(config)
    values = stored | changes | {"model": str(directory), "tokenizer": None, "cased": False}
    task = values.pop("task", None)
    settings = Settings.of(str(task), values)
    # Of the training only what decides how batches are run; the rest may not fit this machine.
    training = TrainingConfig(
        output_dir=directory, epochs=1, precision=precision, eval_batch_tokens=settings.training.eval_batch_tokens
    )
    return dataclasses.replace(settings, training=training)
