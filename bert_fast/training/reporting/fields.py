"""Fields of run.json and metrics.jsonl: whether they hold what a page is made of."""

import datetime
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["check_line", "check_plan", "check_start"]

_GREATEST = 1e30  # of numbers that can be added up and drawn


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _GREATEST


def _is_measured(value: Any) -> bool:
    """A number, or none where it was not finite."""
    return value is None or _is_number(value)


def _is_time(value: Any) -> bool:
    try:
        return datetime.datetime.fromisoformat(value) is not None
    except (TypeError, ValueError):
        return False


Kinds = Mapping[str, tuple[Callable[[Any], bool], str]]

_NUMBER = (_is_number, "a number")
_MEASURED = (_is_measured, "a number")
_COUNT = (lambda value: isinstance(value, int) and _is_number(value), "a whole number")
_TEXT = (lambda value: isinstance(value, str), "a text")
_MAPPING = (lambda value: isinstance(value, dict), "an object")
_TIME = (_is_time, "a time")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_NUMBERS = (
    lambda value: (
        isinstance(value, dict) and all(_is_number(one) or (one != one) for one in value.values())  # NaN is no number
    ),
    "numbers by name",
)

_PLAN: Kinds = {
    "task": _TEXT, "model": _TEXT, "config": _MAPPING, "steps": _COUNT, "num_parameters": _COUNT,
    "num_examples": _COUNT, "num_valid_examples": _COUNT,
}  # fmt: skip
_START: Kinds = {
    "time": _TIME, "first_step": _COUNT, "command": _TEXT, "directory": _TEXT, "versions": _MAPPING,
    "machine": _MAPPING,
}  # fmt: skip
_MACHINE: Kinds = {"device": _TEXT, "processes": _COUNT, "processor": _TEXT, "cores": _COUNT, "system": _TEXT}
_STEP: Kinds = {
    "losses": _NUMBERS, "tokens": _NUMBER, "capacity_tokens": _NUMBER, "seconds": _NUMBER, "wait_seconds": _NUMBER,
    "epoch": _NUMBER, "memory_bytes": _NUMBER, "learning_rate": _MEASURED, "grad_norm": _MEASURED,
}  # fmt: skip
_EVALUATION: Kinds = {"metrics": _NUMBERS, "epoch": _NUMBER, "seconds": _NUMBER, "is_best": _FLAG}
_LINES: Mapping[str, Kinds] = {"step": _STEP, "evaluation": _EVALUATION, "note": {"text": _TEXT}}
_ALSO: Kinds = {"tokens_per_s": _MEASURED, "mfu": _MEASURED}  # in lines of steps since they are written


def check_plan(plan: Mapping[str, Any]) -> None:
    """Raises ValueError unless a plan's fields are there and of their kinds; the message names the field."""
    _check(plan, _PLAN)


def check_start(start: Any) -> None:
    """Likewise, one of the starts of run.json."""
    if not isinstance(start, dict):
        raise ValueError(f"expected an object, got {type(start).__name__}")
    _check(start, _START)
    _check(start["machine"], _MACHINE)
    if start.get("ended") is not None:
        _check(start, {"ended": _TIME, "outcome": _TEXT})


def check_line(line: Mapping[str, Any]) -> None:
    """Likewise, a line of metrics.jsonl, after its kind."""
    kind = line["kind"]
    if not isinstance(kind, str):
        raise ValueError(f"kind: expected a text, got {reprlib.repr(kind)}")
    _check(line, _LINES.get(kind, {}))
    _check(line, {name: wanted for name, wanted in _ALSO.items() if name in line})


def _check(record: Mapping[str, Any], kinds: Kinds) -> None:
    for name, (is_right, wanted) in kinds.items():
        if name not in record:
            raise ValueError(f"{name}: is missing")
        if not is_right(record[name]):
            raise ValueError(f"{name}: expected {wanted}, got {reprlib.repr(record[name])}")
