"""`Task`: what a run trains on, what its loss is made of, and how good a model is at it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from bert_fast.data.source import Source
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training.predictions import Predictions

__all__ = ["Task", "check_sources"]


def check_sources(kind: type, **sources: Any) -> None:
    """Raises TypeError unless each is of this kind, or None; the names are those of arguments."""
    for name, source in sources.items():
        if source is not None and not isinstance(source, kind):
            raise TypeError(f"{name}: expected a {kind.__name__}, got {type(source).__name__}")


class Task(ABC):
    """Examples to train on and to judge by, the parts of the loss, and the metrics.

    Attributes:
        name: the word of the command line: "pretrain", "classify", "ner", "qa", "choice".
        train: examples to learn from; None for a task that only judges or predicts.
        valid: labelled examples to judge by, or None.
        metric: the key of `score`'s result by which the best checkpoint is chosen; "loss" is always there.
        higher_is_better: of that metric.
    """

    name: str
    train: Source | None
    valid: Source | None
    metric: str = "loss"
    higher_is_better: bool = False

    def model_config(self) -> dict[str, Any]:
        """Entries of the model's configuration that the task decides, such as num_labels and id2label."""
        return {}

    def label_counts(self, batch: PackedBatch) -> dict[str, int]:
        """How many labels each part of the loss is the mean of, counted on the host: {part: number}.

        The loss of a step is, for each part, the mean over the labels of all its batches, in all processes.
        """
        return {"loss": batch.num_sequences}

    def loss_parts(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The parts of the loss of a batch on the model's device: {part: mean over its labels, Tensor []}."""
        return {"loss": model(**batch).loss}

    @abstractmethod
    def predict(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(parts of the loss, what the model says) for a batch, without gradients, model in evaluation mode.

        What it says are tensors with an entry per example ([B, ...]), or per token ([T, ...]), in the order of the
        batch, under names of the task's own. The parts are {} for a batch without labels.
        """

    @abstractmethod
    def score(self, source: Source, predictions: Predictions) -> dict[str, float]:
        """Metrics over all examples of a labelled source, all in one process; `loss` comes from the caller."""

    @abstractmethod
    def write_predictions(self, path: Path, source: Source, predictions: Predictions) -> list[Path]:
        """Writes what the model says about every example, for people and programs; returns the files.

        Args:
            path: without an ending, as run/predictions/valid; the task adds what its files are.
            source: the examples, with or without labels.
            predictions: of all of them.
        """

    def describe(self, source: Source, index: int) -> str:
        """One example as text, for `--dry-run`: its tokens, its labels beside them."""
        batch = source.batch(0, np.array([index]))
        return " ".join(map(str, batch["input_ids"].tolist()))
