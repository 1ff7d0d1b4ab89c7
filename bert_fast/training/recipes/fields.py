"""Fields of settings: one description of each, by which a YAML value and a flag's text are read alike."""

import dataclasses
import inspect
import re
import reprlib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["MISSING", "Field", "fields_of"]

MISSING = dataclasses.MISSING
_COMMENT = re.compile(r"^    (\w+):[^#\n]*#\s*(.+?)\s*$", re.MULTILINE)
_NAMES = {int: "a whole number", float: "a number", str: "text", Path: "a path", bool: "true or false"}


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
    return int(value.replace("_", "")) if isinstance(value, str) else int(value)


def _number(value: Any) -> float | int:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, str):  # YAML takes 3e-5 for text: its floats have a point
        return float(value)
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
