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
import inspect
import os
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_fast.checks import check_choice
from bert_fast.files import path_name
from bert_fast.numerals import parsed_integer, parsed_number
from bert_fast.training import config
from bert_fast.training.config import SettingsError, TrainingConfig
from bert_fast.training.tasks import TASKS, TaskSettings

__all__ = [
    "MISSING",
    "TASKS",
    "Field",
    "ModelSettings",
    "Settings",
    "SettingsError",
    "default_of",
    "fields_of",
    "read_yaml",
    "settings_fields",
]

MISSING = dataclasses.MISSING
_TRAINING_CHOICES = {
    "optimizer": config.OPTIMIZERS,
    "schedule": config.SCHEDULES,
    "precision": config.PRECISIONS,
    "sharding": config.SHARDING,
}
# Where one of each is said, the other's default is not meant.
_DURATION = ("epochs", "steps")
_BATCH = ("batch_size", "batch_tokens")
_TOP_LEVEL = 3  # of YAML's events: within the stream, the document, the mapping of names
_MAX_NESTING = 20
_COMMENT = re.compile(r"^    (\w+):[^#\n]*#\s*(.+?)\s*$", re.MULTILINE)
_NAMES = {int: "a whole number", float: "a number", str: "text", Path: "a path", bool: "true or false"}


@dataclass(frozen=True)
class ModelSettings:
    """The model to start from, and its tokenizer."""

    model: str  # checkpoint directory; to pretrain also a config.json, or tiny, mini, small, medium, base or large
    tokenizer: str | None = None  # directory, tokenizer.json or vocab.txt; default: beside the model
    cased: bool = False  # with a vocab.txt: keep case and accents


@dataclass(frozen=True)
class Field:
    """A field of a dataclass of settings.

    Attributes:
        name: as in Python and YAML; the flag has dashes for underscores.
        kind: of one value: int, float, str, bool or Path.
        is_optional: whether None is a value.
        is_list: whether it holds several values.
        count: how many it then holds; None: any number from 1 on.
        choices: the only values allowed; empty: any.
        default: `MISSING` where a value must be given.
        help: the comment beside the field.
    """

    name: str
    kind: type
    is_optional: bool
    is_list: bool
    count: int | None
    choices: tuple[str, ...]
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """As the command line has it."""
        return "--" + self.name.replace("_", "-")

    def read(self, value: Any) -> Any:
        """A value of YAML, or the text (or texts) of a flag, as the field holds it.

        Raises:
            ValueError: it is of another type or none of the choices; the message names the field and the value.
        """
        # How the text of a flag says None: "none" where that cannot be a value, or nothing.
        nothing = ("", "none") if self.kind in (int, float) else ("",)
        if value is None or (self.is_optional and isinstance(value, str) and value.lower() in nothing):
            if self.is_optional:
                return None
            raise ValueError(f"{self.name}: expected {self._expected()}, got nothing")
        if not self.is_list:
            return self.read_one(value)
        many = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        if len(many) != (self.count or max(1, len(many))):
            raise ValueError(f"{self.name}: expected {self.count or 'some'} values, got {len(many)}")
        return tuple(self.read_one(one) for one in many)

    def read_one(self, value: Any) -> Any:
        """One of several values; errors as of `read`."""
        try:
            result = _READERS[self.kind](value)
        except (TypeError, ValueError):
            raise ValueError(f"{self.name}: expected {self._expected()}, got {_shown(value)}") from None
        if self.choices and result not in self.choices:
            raise ValueError(f"{self.name}: expected one of {', '.join(self.choices)}, got {_shown(value)}")
        return result

    def _expected(self) -> str:
        return ("a list, each " if self.is_list else "") + _NAMES[self.kind]


def _shown(value: Any) -> str:
    """For a message; lists in part, as they may have no end."""
    return repr(value) if isinstance(value, str | int | float) else reprlib.repr(value)


def fields_of(cls: type, choices: dict[str, tuple[str, ...]] | None = None) -> dict[str, Field]:
    """The fields of a dataclass by name, in their order.

    Args:
        cls: with fields of int, float, str, bool, Path, Literal of str, tuples of them, and each of these or None.
        choices: of fields whose type does not tell them.
    """
    types_by_name = typing.get_type_hints(cls)
    comments = _comments(cls)
    found = {}
    for entry in dataclasses.fields(cls):
        kind, is_optional, is_list, count, allowed = _kind(types_by_name[entry.name])
        allowed = allowed or (choices or {}).get(entry.name, ())
        found[entry.name] = Field(
            entry.name, kind, is_optional, is_list, count, allowed, entry.default, comments.get(entry.name, "")
        )
    return found


def _kind(hint: Any) -> tuple[type, bool, bool, int | None, tuple[str, ...]]:
    """(type of one value, None allowed, several, how many, choices) of an annotation."""
    is_optional = is_list = False
    count = None
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = [one for one in typing.get_args(hint) if one is not type(None)]
        is_optional = True
    if typing.get_origin(hint) is tuple:
        entries = typing.get_args(hint)
        is_list, hint, count = True, entries[0], None if entries[-1] is Ellipsis else len(entries)
    if typing.get_origin(hint) is typing.Literal:
        return str, is_optional, is_list, count, typing.get_args(hint)
    assert hint in _READERS, hint
    return hint, is_optional, is_list, count, ()


def _comments(cls: type) -> dict[str, str]:
    """What stands beside each field; nothing where the source is not at hand."""
    try:
        return dict(_COMMENT.findall(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}


def _whole(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return parsed_integer(value) if isinstance(value, str) else int(value)


def _number(value: Any) -> float | int:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, str):  # YAML takes 3e-5 for text: its floats have a point
        return parsed_number(value)
    if not isinstance(value, int | float):
        raise TypeError
    return value


def _text(value: Any) -> str:
    # A column's number and the label 0 are numbers in YAML; "yes" and "no" without quotes are booleans: ask for quotes.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    return str(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise TypeError
    return Path(value)


_READERS: dict[Any, Any] = {int: _whole, float: _number, str: _text, bool: _truth, Path: _path}


def settings_fields(task: str) -> dict[str, Field]:
    """All settings of a task by name."""
    parts = (fields_of(ModelSettings), fields_of(TASKS[task]), fields_of(TrainingConfig, _TRAINING_CHOICES))
    return {name: field for part in parts for name, field in part.items()}


def default_of(task: str, field: Field) -> Any:
    """What a setting is where nothing is said of it; `MISSING` where something must be."""
    return TASKS[task].training_defaults.get(field.name, field.default)


@dataclass(frozen=True)
class Settings:
    """A run: what it starts from, learns from, and how.

    Attributes:
        task: a key of `TASKS`.
        model, data, training: its parts; their fields have different names.
    """

    task: str
    model: ModelSettings
    data: TaskSettings
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
        defaults = dict(TASKS[task].training_defaults)
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
