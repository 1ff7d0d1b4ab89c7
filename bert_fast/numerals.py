"""Numbers in texts, as people write them; Python's `int` and `float` also take 1_000, and digits of other scripts.

Imports nothing that is slow to import, for the commands.
"""

import math
import re
import reprlib
from typing import Any

_INTEGER = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
_LARGEST = 3.4028234663852886e38  # of fp32


def parsed_integer(text: str) -> int:
    """The whole number that a text holds, in ASCII digits.

    Raises: ValueError: it holds something else.
    """
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"expected a whole number, got {reprlib.repr(text)}")
    return int(text)


def parsed_number(text: str) -> float:
    """The number that a text holds, such as 5, 0.5, 3e-5 or inf, in ASCII digits.

    Raises: ValueError: it holds something else.
    """
    if "_" in text or not text.isascii():
        raise ValueError(f"expected a number, got {reprlib.repr(text)}")
    return float(text)


def table_number(value: Any) -> float:
    """A value of a table as a number that fp32 can hold; NaN where it is none, or a bool, inf or NaN."""
    try:
        number = (
            math.nan if isinstance(value, bool) else parsed_number(value) if isinstance(value, str) else float(value)
        )
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) <= _LARGEST else math.nan
