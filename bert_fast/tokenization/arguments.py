"""Checks of the tokenizer's arguments: they ask for no more than is needed, and name the argument that has it not."""

import reprlib
from typing import Any

__all__ = ["check_flags", "members", "plain", "strings"]


def plain(name: str, values: Any) -> Any:
    """What an array or tensor holds as Python's own numbers and lists; other values as they are.

    Raises:
        TypeError: a tensor that holds no values.
    """
    if not hasattr(values, "tolist"):
        return values
    try:
        return values.tolist()
    except (RuntimeError, TypeError):
        raise TypeError(f"{name}: expected a list, got a {type(values).__name__} without values") from None


def members(name: str, values: Any) -> list[Any]:
    """The members of a list, array, tensor or other iterable; those of arrays and tensors as Python's own.

    Raises:
        TypeError: it has none.
    """
    values = plain(name, values)
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name}: expected a list, got {reprlib.repr(values)}") from None


def strings(name: str, values: Any) -> list[str]:
    """The strings of a list or other iterable; none of None.

    Raises:
        TypeError: it holds something else.
    """
    listed = [] if values is None else members(name, values)
    for index, value in enumerate(listed):
        if not isinstance(value, str):
            raise TypeError(f"{name}[{index}]: expected a str, got {type(value).__name__}")
    return listed


def check_flags(**flags: Any) -> None:
    """Raises TypeError if one of these is neither true nor false, as arrays and tensors are not."""
    for name, flag in flags.items():
        try:
            bool(flag)
        except (RuntimeError, TypeError, ValueError):
            raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}") from None
