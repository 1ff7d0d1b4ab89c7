"""`Task`: what a run trains on, what its loss is made of, and how good a model is at it.

`Predictions`: what a model says about the examples of a source.
"""

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from bert_fast.data.arguments import row_indices, whole_numbers
from bert_fast.data.batches import Batches, Source
from bert_fast.tokenization.pack import PackedBatch

__all__ = ["Predictions", "Task"]


class Predictions:
    """Arrays by name, for all examples 0 to n - 1, whatever batches and processes they came from.

    lengths (int [n]): tokens of every example, so that what belongs to tokens finds its example again.
    """

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = whole_numbers("lengths", lengths).astype(np.int64, copy=False)
        self._batches: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, indices: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes what the model said about the examples `indices` (int [B]): arrays [B, ...] or [T, ...], in that order.

        Raises:
            TypeError: something else. IndexError: there is no such example.
            ValueError: an array has an entry neither per example nor per token.
        """
        indices = row_indices(indices, len(self))
        if not isinstance(arrays, Mapping):
            raise TypeError(f"arrays: expected a mapping, got {type(arrays).__name__}")
        tokens = int(self.lengths[indices].sum())
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray) or not array.ndim:
                raise TypeError(f"arrays[{name!r}]: expected an array [B, ...] or [T, ...], got {type(array).__name__}")
            if len(array) not in (len(indices), tokens):
                expected = f"{len(indices)} entries (examples) or {tokens} (tokens)"
                raise ValueError(f"arrays[{name!r}]: expected {expected}, got {len(array)}")
        self._batches.append((indices, dict(arrays)))

    def batches(self) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """What was added, to be sent to another process and added there."""
        return self._batches

    def rows(self, name: str) -> np.ndarray:
        """An array with an entry per example, in the order of the examples: [n, ...].

        Raises:
            KeyError: nothing of that name was added.
            ValueError: examples are missing.
        """
        found = [(indices, arrays[name]) for indices, arrays in self._batches]
        if not found:
            raise KeyError(name)
        indices = np.concatenate([one for one, _ in found])
        self._check_complete(indices)
        values = np.concatenate([array for _, array in found])
        ordered = np.empty((len(self), *values.shape[1:]), values.dtype)
        ordered[indices] = values
        return ordered

    def tokens(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """An array with an entry per token, in the order of the examples: (values [T, ...], boundaries int64 [n + 1]).

        Those of example i are values[boundaries[i]:boundaries[i + 1]]. Raises as `rows`.
        """
        boundaries = np.concatenate([[0], np.cumsum(self.lengths)])
        ordered: np.ndarray | None = None
        seen = []
        for indices, arrays in self._batches:
            values, lengths = arrays[name], self.lengths[indices]
            if ordered is None:
                ordered = np.empty((int(boundaries[-1]), *values.shape[1:]), values.dtype)
            starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
            places = np.arange(int(lengths.sum())) + np.repeat(boundaries[indices] - starts, lengths)
            ordered[places] = values
            seen.append(indices)
        if ordered is None:
            raise KeyError(name)
        self._check_complete(np.concatenate(seen))
        return ordered, boundaries

    def _check_complete(self, indices: np.ndarray) -> None:
        missing = np.setdiff1d(np.arange(len(self)), indices)
        if len(missing):
            raise ValueError(
                f"predictions: expected all {len(self)} examples, {len(missing)} are missing: {missing[:5]}"
            )


class Task(ABC):
    """Examples to train on and to judge by, the parts of the loss, and the metrics.

    Attributes:
        name: the word of the command line: "pretrain", "classify", "ner", "qa", "choice".
        train: examples to learn from; None for a task that only judges or predicts.
        valid: labelled examples to judge by, or None.
        metric: the key of `score`'s result by which the best checkpoint is chosen; "loss" is always there.
        higher_is_better: of that metric.
        falling: metrics that are the better the lower they are.
    """

    name: str
    train: Source | None
    valid: Source | None
    metric: str = "loss"
    higher_is_better: bool = False
    falling: tuple[str, ...] = ("loss",)

    def is_better_when_higher(self, metric: str) -> bool:
        """Of a metric by its name: all are but those of `falling`."""
        return metric not in self.falling

    def meaning_of_stall(self, metrics: Mapping[str, float]) -> str | None:
        """What it means, and what to try, that the loss no longer falls; None: nothing is known of it.

        metrics: of the last evaluation.
        """
        return None

    def model_config(self) -> dict[str, Any]:
        """Entries of the model's configuration that the task decides, such as num_labels and id2label."""
        return {}

    def class_names(self) -> list[str]:
        """The names of the classes 0, 1, ... where the task has any, as `model_config` gives them."""
        names = self.model_config().get("id2label", {})
        return [names[number] for number in sorted(names)]

    def notes(self, batches: Batches) -> list[str]:
        """What should be known of the examples to learn from before the first step, a line each; batches: of them.

        Here: classes whose names look alike.
        """
        first: dict[str, int] = {}
        names, notes = self.class_names(), []
        for number, name in enumerate(names):
            other = first.setdefault(" ".join(unicodedata.normalize("NFKC", name).casefold().split()), number)
            if other != number:
                notes.append(
                    f"labels: {names[other]!r} (class {other}) and {name!r} (class {number}) differ only in case, "
                    "spaces or the form of characters; if they mean the same, write them alike"
                )
        return notes

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
