"""`Settings`: all that a run is made of, in one flat space of names, from a YAML file and the command line.

Names in the file and of the flags are the same, and flags win: with a file run.yaml of

    model: models/base
    train: train.tsv
    text: sentence
    output_dir: runs/polarity

`bert-fast finetune classify --config run.yaml --epochs 4` adds one. Paths are those of the directory that it runs in.
"""

import dataclasses
import difflib
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bert_fast.checks import check_choice
from bert_fast.files import path_name
from bert_fast.training import config
from bert_fast.training.config import TrainingConfig
from bert_fast.training.recipes.fields import MISSING, Field, fields_of

__all__ = [
    "TASKS", "ChoiceData", "ClassifyData", "Data", "ModelSettings", "NerData", "PretrainData", "QaData", "Settings",
    "SettingsError", "default_of", "read_yaml", "settings_fields",
]  # fmt: skip


class SettingsError(ValueError):
    """A setting is unknown, missing or of a wrong value; the message names it, and the file it is in."""


@dataclass(frozen=True)
class ModelSettings:
    """The model to start from, and its tokenizer."""

    model: str  # checkpoint directory; to pretrain also a config.json, or tiny, mini, small, medium, base or large
    tokenizer: str | None = None  # directory, tokenizer.json or vocab.txt; default: beside the model
    cased: bool = False  # with a vocab.txt: keep case and accents


@dataclass(frozen=True)
class PretrainData:
    """Text to learn words, and which sentence follows which, from."""

    train: tuple[str, ...]  # text files, or one token store
    valid: tuple[str, ...] | None = None  # the same, to judge by
    format: Literal["auto", "text", "lines", "jsonl", "parquet"] = "auto"  # of text files; auto: by their endings
    field: str = "text"  # key or column of the text in JSON lines and Parquet
    max_length: int = 128  # tokens of an example, special tokens counted
    next_sentence: bool = True  # pairs of sentences, and whether the second follows; else masked words only
    whole_words: bool = False  # mask all pieces of a word or none
    mask_probability: float = 0.15  # share of tokens to predict
    short_sequence_probability: float = 0.1  # share of pairs made shorter than max_length
    long_length: int | None = None  # a second phase with examples of this length
    long_share: float = 0.1  # of the steps, that the second phase takes

    def __post_init__(self) -> None:
        if self.long_length is not None and self.long_length <= self.max_length:
            raise ValueError(f"long_length: expected more than max_length={self.max_length}, got {self.long_length}")
        if not 0 < self.long_share < 1:
            raise ValueError(f"long_share: expected a share between 0 and 1, got {self.long_share}")


@dataclass(frozen=True)
class ClassifyData:
    """Texts, or pairs of texts, each with a label or a number."""

    train: str  # TSV, CSV, JSON lines or Parquet
    valid: str | None = None  # the same, to judge by
    valid_share: float | None = None  # without valid: share of train, at random, kept to judge by
    text: str = "text"  # column; of a file without a header its number, from 0
    text_pair: str | None = None  # column of a second text
    label: str = "label"  # column
    labels: tuple[str, ...] | None = None  # all labels, in the order of their numbers; default: those in train, sorted
    regression: bool = False  # labels are numbers to come close to
    max_length: int = 128  # tokens; longer texts are cut


@dataclass(frozen=True)
class NerData:
    """Words in columns, each with a tag (B-PER, I-PER, O)."""

    train: str  # CoNLL columns
    valid: str | None = None  # the same, to judge by
    word_column: int = 0  # from 0
    label_column: int | None = -1  # from 0; -1 is the last
    labels: tuple[str, ...] | None = None  # all tags, in the order of their numbers; default: those in train
    max_length: int = 256  # tokens; longer sentences become several examples
    truncate: bool = False  # longer sentences lose their end instead


@dataclass(frozen=True)
class QaData:
    """Questions whose answer is a span of a text, as in SQuAD."""

    train: str  # JSON as SQuAD has it, version 1.1 or 2.0, or JSON lines
    valid: str | None = None  # the same, to judge by
    valid_share: float | None = None  # without valid: share of train, at random, kept to judge by
    max_length: int = 384  # tokens of question and window of the context
    stride: int = 128  # tokens that neighbouring windows share
    skip_wrong_answers: bool = False  # leave out answers that do not stand in the text; else they are errors
    max_answer_length: int = 30  # tokens
    may_abstain: bool | None = None  # there may be no answer; default: if that is so in train or valid
    null_threshold: float = 0.0  # with may_abstain: no answer must score so much better than the best one


@dataclass(frozen=True)
class ChoiceData:
    """Questions with several answers to choose from, as in SWAG and COPA."""

    train: str  # CSV or JSON lines
    valid: str | None = None  # the same, to judge by
    valid_share: float | None = None  # without valid: share of train, at random, kept to judge by
    label: str = "label"  # column
    max_length: int = 128  # tokens of a choice with its context


Data = PretrainData | ClassifyData | NerData | QaData | ChoiceData

# task -> its data
TASKS: dict[str, type[Any]] = {
    "pretrain": PretrainData,
    "classify": ClassifyData,
    "ner": NerData,
    "qa": QaData,
    "choice": ChoiceData,
}
_TRAINING_CHOICES = {
    "optimizer": config.OPTIMIZERS,
    "schedule": config.SCHEDULES,
    "precision": config.PRECISIONS,
    "sharding": config.SHARDING,
}
# What differs from TrainingConfig's own defaults. Devlin et al. 2018 (arXiv:1810.04805), appendix A.2 and A.3.
_PRETRAIN = {"learning_rate": 1e-4, "warmup": 0.01, "batch_size": None, "batch_tokens": 16384}
_FINETUNE = {"learning_rate": 3e-5, "warmup": 0.1, "epochs": 3}
# Where one of each is said, the other's default is not meant.
_DURATION = ("epochs", "steps")
_BATCH = ("batch_size", "batch_tokens")
_TOP_LEVEL = 3  # of YAML's events: within the stream, the document, the mapping of names
_MAX_NESTING = 20


def settings_fields(task: str) -> dict[str, Field]:
    """All settings of a task by name."""
    parts = (fields_of(ModelSettings), fields_of(TASKS[task]), fields_of(TrainingConfig, _TRAINING_CHOICES))
    return {name: field for part in parts for name, field in part.items()}


def default_of(task: str, field: Field) -> Any:
    """What a setting is where nothing is said of it; `MISSING` where something must be."""
    return _defaults(task).get(field.name, field.default)


def _defaults(task: str) -> dict[str, Any]:
    return _PRETRAIN if task == "pretrain" else _FINETUNE


@dataclass(frozen=True)
class Settings:
    """A run: what it starts from, learns from, and how.

    Attributes:
        task: a key of `TASKS`.
        model, data, training: its parts; their fields have different names.
    """

    task: str
    model: ModelSettings
    data: Data
    training: TrainingConfig

    @classmethod
    def of(cls, task: str, values: Mapping[str, Any]) -> "Settings":
        """Settings from names and values, as a YAML file has them.

        Raises:
            SettingsError: an unknown name (the message proposes the nearest), a wrong value, a missing one.
        """
        return cls._made(task, _read(task, values))

    @classmethod
    def load(cls, task: str, file: str | os.PathLike[str] | None, flags: Mapping[str, Any]) -> "Settings":
        """Settings from a YAML file, and from flags, which add to it and replace what it says.

        Raises:
            SettingsError: see `of` and `read_yaml`; the file is of another task.
        """
        if not isinstance(flags, Mapping):
            raise TypeError(f"flags: expected a mapping of names to values, got {type(flags).__name__}")
        values: dict[str, Any] = {}
        if file is not None:
            values = read_yaml(file)
            found = values.pop("task", task)
            if found != task:
                raise SettingsError(f"{file}: task: expected {task}, got {found}")
            try:
                values = _read(task, values)
            except SettingsError as error:
                raise SettingsError(f"{file}: {error}") from None
        given = _read(task, flags)
        if given.keys() & set(_DURATION):
            values = {name: value for name, value in values.items() if name not in _DURATION}
        return cls._made(task, values | given)

    @classmethod
    def _made(cls, task: str, given: dict[str, Any]) -> "Settings":
        defaults = dict(_defaults(task))
        for group in (_DURATION, _BATCH):
            if any(given.get(name) is not None for name in group):
                defaults |= dict.fromkeys(group)
        missing = [name for name, field in settings_fields(task).items() if field.default is MISSING]
        missing = [name for name in missing if name not in given]
        if missing:
            raise SettingsError(f"{', '.join(missing)}: missing: there is no default")
        try:
            parts = [_part(part, defaults | given) for part in (ModelSettings, TASKS[task], TrainingConfig)]
        except (TypeError, ValueError) as error:
            raise SettingsError(str(error)) from None
        share = getattr(parts[1], "valid_share", None)
        if share is not None and (parts[1].valid is not None or not 0 < share < 1):
            raise SettingsError(f"valid_share: expected a share between 0 and 1, and no valid, got {share}")
        return cls(task, *parts)

    def as_dict(self) -> dict[str, Any]:
        """Names and plain values, for JSON and YAML: `of(task, rest)` makes the same settings of them."""
        values: dict[str, Any] = {"task": self.task}
        for part in (self.model, self.data):
            values |= {name: list(value) if isinstance(value, tuple) else value for name, value in vars(part).items()}
        return values | self.training.as_dict()


def read_yaml(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Names and values of a YAML file.

    Raises:
        SettingsError: it cannot be read, is not YAML, or holds no mapping of names.
        ImportError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"settings in YAML need PyYAML: pip install bert_fast[train] ({error})") from error
    try:
        name = path_name("file", file)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
        _check_nesting(yaml.parse(text, Loader=yaml.SafeLoader))
        values = yaml.safe_load(text)
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsError(f"{file}: is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise SettingsError(f"{file}: expected lines of the form name: value, got {type(values).__name__}")
    return values


def _check_nesting(events: Iterable[Any]) -> None:
    """Refuses what a few lines of YAML can make endless: lists within lists, and aliases (*name) in them.

    Raises:
        ValueError: the message says where.
    """
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > _MAX_NESTING or (kind == "AliasEvent" and depth > _TOP_LEVEL):
            what = "an alias within a list" if kind == "AliasEvent" else "nested too deeply"
            raise ValueError(f"line {event.start_mark.line + 1}: {what}: expected lines of the form name: value")


def _read(task: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as their fields hold them."""
    try:
        check_choice("task", task, TASKS)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    if not isinstance(values, Mapping):
        raise TypeError(f"values: expected a mapping of names to values, got {type(values).__name__}")
    fields = settings_fields(task)
    found = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise SettingsError(f"values: expected names of settings, got {reprlib.repr(name)}")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            raise SettingsError(
                f"{name}: no such setting"
                + (f"; did you mean {near[0]}?" if near else f"; there are {', '.join(sorted(fields))}")
            )
        try:
            found[name] = fields[name].read(value)
        except ValueError as error:
            raise SettingsError(str(error)) from None
    return found


def _part(cls: type[Any], values: Mapping[str, Any]) -> Any:
    return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values})
