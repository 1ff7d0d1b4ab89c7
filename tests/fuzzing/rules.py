"""What a refusal must be: an exception of a kind that a caller can expect, whose message names what was wrong.

Allowed kinds: the exceptions that the library defines, and TypeError, ValueError and the OSErrors that the operating
system gives for files, exactly these. Subclasses such as UnicodeDecodeError or json's JSONDecodeError know of bytes and
columns but not of arguments and files, and a caller who reads one has to guess; RuntimeError, IndexError, KeyError,
AttributeError, AssertionError, RecursionError, MemoryError, OverflowError and NotImplementedError say that something
went on with values that should have been refused.

Named is an argument of the called function (or one that the surface adds: a field of a configuration, an option of a
command), or a file or folder. Python's own messages about the way a function is called name the function.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

_FILE_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_KINDS = {TypeError, ValueError, OSError, *_FILE_ERRORS}
# `f() missing 1 required positional argument: 'x'`, `f() takes 2 positional arguments but 3 were given`; a schema's.
_BINDING = re.compile(
    r"[\w.<>]+\(\) (missing|takes|got (an unexpected|multiple values|some positional))"
    r"|bert_fast::\w+\(\) (Expected a value of type|is missing value|[Ee]xpected at most|Provided|Unknown)"
)
_SHORT = 3  # names of fewer letters are words of many sentences: they count only where the message goes on as ours do


def objection(error: BaseException, names: Iterable[str]) -> str | None:
    """What is wrong with the exception as the answer to bad arguments; None if nothing is."""
    message = str(error)
    if isinstance(error, TypeError | RuntimeError) and _BINDING.match(message):
        return None  # an op's schema refuses with RuntimeErrors, before the op is reached
    if type(error) not in _KINDS and not type(error).__module__.startswith("bert_fast."):
        return f"{_kind(error)} where TypeError, ValueError, OSError or an exception of bert_fast is due: {message}"
    if isinstance(error, OSError) and error.filename:
        return None
    if any(_is_named(name, message) for name in names):
        return None
    return f"{_kind(error)} that names no argument and no file: {message}"


def _kind(error: BaseException) -> str:
    module = type(error).__module__
    return type(error).__name__ if module == "builtins" else f"{module}.{type(error).__name__}"


def _is_named(name: str, message: str) -> bool:
    if name not in message:
        return False
    return _pattern(name).search(message) is not None


@functools.lru_cache(4096)
def _pattern(name: str) -> re.Pattern[str]:
    ending = r"(\[[^\]]*\])*:" if len(name) < _SHORT else r"(?!\w)"
    return re.compile(rf"(?<!\w){re.escape(name)}{ending}")


@functools.lru_cache(1024)
def argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of a function, or of an op's schema."""
    schema = getattr(function, "_schema", None)
    if schema is not None:
        return tuple(argument.name for argument in schema.arguments)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()
    return tuple(name for name in parameters if name not in ("self", "args", "kwargs"))
