"""Checks of the tokenizer's arguments: they ask for no more than is needed, and name the argument that has it not."""

import operator
import reprlib
from typing import Any


def shown(value: Any) -> str:
    """The value as messages show it, shortened; its type where Python writes none, as of ints of 10,000 digits."""
    try:
        return reprlib.repr(value)
    except Exception:  # whatever its __repr__ raises
        return f"<{type(value).__name__}>"


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
        raise TypeError(f"{name}: expected a list, got {shown(values)}") from None


def strings(name: str, values: Any) -> list[str]:
    """The strings of a list or other iterable; none of None.

    Raises:
        TypeError: it holds something else.
        ValueError: one has lone surrogates, which UTF-8 cannot hold.
    """
    listed = [] if values is None else members(name, values)
    for index, value in enumerate(listed):
        if not isinstance(value, str):
            raise TypeError(f"{name}[{index}]: expected a str, got {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}[{index}]: expected a str without lone surrogates, got {shown(value)}") from None
    return listed


def as_index(name: str, value: Any) -> int:
    """`value` as an int that can count places.

    Raises:
        TypeError: it is no integer.
        ValueError: of more than 64 bits.
    """
    try:
        index = operator.index(value)
    except Exception:  # a tensor's __index__ raises whatever fails
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if not -(2**63) <= index < 2**63:
        raise ValueError(f"{name}: expected an int of at most 64 bits, got {shown(index)}")
    return index


def check_device(device: Any) -> None:
    """Raises ValueError unless `device` names one, or is None."""
    import torch  # only for those who have tensors

    try:
        torch.device("cpu" if device is None else device)
    except Exception:
        raise ValueError(f"device: expected a device, got {shown(device)}") from None


def check_flags(**flags: Any) -> None:
    """Raises TypeError if one of these is neither true nor false, as arrays and tensors are not."""
    for name, flag in flags.items():
        if flag is True or flag is False:  # much quicker than to ask it
            continue
        try:
            bool(flag)
        except Exception:  # whatever its __bool__ raises
            raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}") from None
