"""Reading the JSON files of a checkpoint, which may hold anything."""

import json
import os
from pathlib import Path
from typing import Any

from bert_fast.errors import CheckpointError
from bert_fast.files import open_regular

_MOST_BYTES = 2**28  # a million class names take a sixth of it
_MOST_LEVELS = 50  # far from where Python's copying and writing of nested values would end


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        CheckpointError: it is missing, no regular file, too large, not UTF-8 or not JSON, or it is nested too deeply or
            gives one key two values; the message names the file.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MOST_BYTES:
                raise ValueError(f"expected at most {_MOST_BYTES} bytes, got {size}")
            values = json.loads(file.read().decode("utf-8-sig"), object_pairs_hook=_consistent)
        for key, value in values.items() if isinstance(values, dict) else ():
            if _is_deeper(value, _MOST_LEVELS):
                raise ValueError(f"{key}: expected at most {_MOST_LEVELS} levels of lists and objects")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file or directory") from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither UTF-8 nor JSON, or a name with a NUL
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    return values


def _consistent(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for key, value in pairs:
            if value != values[key]:
                raise ValueError(f"{key} has two values")
    return values


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)
