"""What tasks share: the base of their settings, from which examples, model and `Task` follow; tables of results."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from bert_fast.data.batches import Source
from bert_fast.data.counter_random import CounterRandom
from bert_fast.errors import CheckpointError
from bert_fast.models import BertConfig, BertPreTrainedModel
from bert_fast.tokenization import Tokenizer
from bert_fast.training.config import SettingsError, TrainingConfig
from bert_fast.training.task import Task

__all__ = [
    "FinetuneSettings",
    "OnMain",
    "TaskSettings",
    "check_sources",
    "label_names",
    "probabilities",
    "source_of_kind",
    "write_table",
]

_Kind = TypeVar("_Kind")
OnMain = Callable[[Callable[[], Any]], Any]  # calls a function in the main process, while others wait

_BREAKS = str.maketrans("\t\n\r", "   ")  # tables have no quoting


class TaskSettings(ABC):
    """What a task learns from, and everything else that depends on which task it is.

    Subclasses are frozen dataclasses. Their fields are settings, by the names of YAML files and flags; the comment
    beside a field is its help.

    Attributes:
        train, valid: files of examples to learn from, and to judge by (or None).
        max_length: tokens of an example.
        summary: what the task is about, as `bert-fast finetune --help` says it.
        training_defaults: where training differs from the defaults of `TrainingConfig`.
        is_pretraining: whether a model may begin with random weights.
    """

    train: Any
    valid: Any
    max_length: Any

    summary: ClassVar[str]
    training_defaults: ClassVar[Mapping[str, Any]]
    is_pretraining: ClassVar[bool] = False

    @property
    @abstractmethod
    def model_class(self) -> type[BertPreTrainedModel]:
        """Of the model that the task trains."""

    @abstractmethod
    def make_task(self, train: Any, valid: Any) -> Task:
        """The task of some sources, or of None.

        Raises:
            ValueError: their labels differ.
        """

    @abstractmethod
    def sources(self, tokenizer: Tokenizer, *, seed: int, tokens_dir: Path | None, on_main: OnMain) -> tuple[Any, Any]:
        """(examples to train on, examples to judge by or None).

        Args:
            tokenizer: as the model's.
            seed: of the run.
            tokens_dir: where tokens are kept for the next start and for other processes; None: nowhere.
            on_main: see `OnMain`.

        Raises:
            SettingsError, OSError, SourceError, StoreError, ValueError: files or settings are missing or wrong.
        """

    @abstractmethod
    def labelled_source(
        self, files: Sequence[str], tokenizer: Tokenizer, *, seed: int, labels: Sequence[str] | None
    ) -> Any:
        """Examples that a trained model, with these labels, is judged by; arguments and errors as of `sources`."""

    @abstractmethod
    def read(
        self,
        examples: Any,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str] | None = None,
        is_labelled: bool = True,
        cache_dir: Path | None = None,
    ) -> Any:
        """The examples of a file, or of rows in memory.

        Args:
            examples: a path, or a list of mappings.
            tokenizer: as the model's.
            labels: all labels, in the order of their numbers; None: those of the settings, else those that occur.
            is_labelled: False: there are none.
            cache_dir: where tokens are kept for the next run; None: nowhere.

        Raises:
            SettingsError, SourceError, OSError, ValueError: see the sources.
        """

    def parse_line(self, line: str, number: int) -> dict[str, Any]:
        """An example without labels, for `read`, of a line of stdin: a JSON object unless the task says otherwise.

        number: of the line, from 1.

        Raises:
            ValueError: what was expected and what came.
        """
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"got {type(row).__name__}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected a JSON object: {error}") from None
        return row

    def label_names(self, id2label: Mapping[int, str], file: Path) -> list[str] | None:
        """Labels in the order of a model's outputs, by its configuration; None: the task has none.

        Raises:
            CheckpointError: some have no name; the message names `file`.
        """
        return None

    @classmethod
    def of_model(cls, config: BertConfig) -> dict[str, Any]:
        """Settings that the configuration of a model tells, where no run left them beside it."""
        return {}

    def completed(self, task: Task) -> "TaskSettings":
        """These settings with what the examples say where they left it open, for those who use the model."""
        return self

    @property
    def longest(self) -> int:
        """Tokens of the longest example of any phase."""
        return int(self.max_length)

    def phases(self, training: TrainingConfig) -> list[tuple["TaskSettings", TrainingConfig]]:
        """The runs that these settings ask for, one after the other, each going on with the model of the one before."""
        return [(self, training)]


class FinetuneSettings(TaskSettings):
    """Settings of a task that a pre-trained model learns from one file of examples.

    Attributes:
        valid_share: where the task has it: share of train, at random, kept to judge by.
    """

    # Devlin et al. 2018 (arXiv:1810.04805), appendix A.3.
    training_defaults: ClassVar[Mapping[str, Any]] = {"learning_rate": 3e-5, "warmup": 0.1, "epochs": 3}

    valid_share: Any = None

    def __post_init__(self) -> None:
        share = self.valid_share
        if share is not None and (self.valid is not None or not 0 < share < 1):
            raise ValueError(f"valid_share: expected a share between 0 and 1, and no valid, got {share}")

    def sources(self, tokenizer: Tokenizer, *, seed: int, tokens_dir: Path | None, on_main: OnMain) -> tuple[Any, Any]:
        """See `TaskSettings.sources`."""
        train = self.read(self.train, tokenizer, cache_dir=tokens_dir)
        if self.valid is not None:
            labels = getattr(train, "label_names", None) or None
            return train, self.read(self.valid, tokenizer, labels=labels, cache_dir=tokens_dir)
        return (train, None) if self.valid_share is None else self._divided(train, seed)

    def _divided(self, source: Any, seed: int) -> tuple[Any, Any]:
        """(most examples, a random share of them)."""
        count, take = self._divisible(source)
        order = CounterRandom(seed, 0, "examples to judge by").permutation(count)
        kept = max(1, round(self.valid_share * count))
        if kept >= count:
            raise SettingsError(f"valid_share: {self.valid_share} leaves none of {count} examples to train on")
        return take(order[kept:]), take(order[:kept])

    def _divisible(self, source: Any) -> tuple[int, Callable[[np.ndarray], Any]]:
        """(how many things a source can be divided into, what makes a source of some)."""
        return len(source), source.take

    def labelled_source(
        self, files: Sequence[str], tokenizer: Tokenizer, *, seed: int, labels: Sequence[str] | None
    ) -> Any:
        """See `TaskSettings.labelled_source`: one file."""
        if len(files) != 1:
            raise SettingsError(f"file: expected one, got {len(files)}")
        return self.read(files[0], tokenizer, labels=labels)


def label_names(id2label: Mapping[int, str], named: Sequence[str] | None, file: Path) -> list[str]:
    """What settings name, else what a configuration does.

    Raises:
        CheckpointError: some labels of the configuration have no name; the message names `file`.
        SettingsError: the settings name more labels, or fewer.
    """
    if named is not None and len(named) != len(id2label):
        raise SettingsError(f"labels: expected {len(id2label)}, as many as the model has, got {len(named)}")
    nameless = [number for number in range(len(id2label)) if number not in id2label]
    if nameless:
        raise CheckpointError(
            f"{file}: id2label: expected names of 0 to {len(id2label) - 1}, got none of {nameless[0]}"
        )
    return [id2label[number] for number in range(len(id2label))] if named is None else list(named)


def check_sources(kind: type, **sources: Any) -> None:
    """Raises TypeError unless each is of this kind, or None; the names are those of arguments."""
    for name, source in sources.items():
        if source is not None and not isinstance(source, kind):
            raise TypeError(f"{name}: expected a {kind.__name__}, got {type(source).__name__}")


def source_of_kind(kind: type[_Kind], source: Source) -> _Kind:
    """The source; raises TypeError unless it is of this kind."""
    if not isinstance(source, kind):
        raise TypeError(f"source: expected a {kind.__name__}, got {type(source).__name__}")
    return source


def probabilities(logits: np.ndarray) -> np.ndarray:
    """The softmax over the last dimension, in fp64."""
    return torch.from_numpy(logits).double().softmax(dim=-1).numpy()


def write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a TSV file with a header: the keys of the first row, which all rows have.

    Numbers that are not whole have six digits; tabs and line ends within texts become spaces.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for number, row in enumerate(rows):
            if number == 0:
                file.write("\t".join(_cell(name) for name in row) + "\n")
            file.write("\t".join(_cell(value) for value in row.values()) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value).translate(_BREAKS)
