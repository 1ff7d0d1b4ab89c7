"""`RunRecord`: what run.json and metrics.jsonl say about a run, ready to be drawn."""

import datetime
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_fast.errors import SourceError
from bert_fast.training.observers import LEVELS
from bert_fast.training.reporting.loggers import read_metrics
from bert_fast.training.reporting.run_directory import RunDirectory

__all__ = ["Curve", "RunRecord", "smoothed"]


@dataclass(frozen=True)
class Curve:
    """Values over steps; not finite where a value was not."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> tuple[float, ...]:
        """The values that are numbers."""
        return tuple(value for value in self.values if math.isfinite(value))

    @property
    def is_drawable(self) -> bool:
        """Whether there is a line to see: two numbers at least."""
        return len(self.finite) > 1


@dataclass(frozen=True)
class RunRecord:
    """A run as it was written down.

    Attributes:
        plan: the fields of `observers.Plan`, of the last start.
        starts: of run.json.
        lines: of metrics.jsonl; empty where the run has not come so far.
    """

    plan: dict[str, Any]
    starts: list[dict[str, Any]]
    lines: list[dict[str, Any]]

    @classmethod
    def read(cls, directory: RunDirectory) -> "RunRecord":
        """Of a directory.

        Raises:
            SourceError: run.json is missing, or one of the two files is damaged.
        """
        stored = directory.read()
        with _damaged(f"{directory.run_json}: plan"):
            _check_plan(stored["plan"])
        for number, start in enumerate(stored["starts"]):
            with _damaged(f"{directory.run_json}: starts[{number}]"):
                _check_start(start)
        lines = read_metrics(directory.metrics) if directory.metrics.exists() else []
        for line in lines:
            with _damaged(f"{directory.metrics}: {line['kind']} at step {line['step']}"):
                _check_line(line)
        return cls(stored["plan"], stored["starts"], lines)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Lines of one kind, in order."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What was said about steps."""
        return self.of_kind("step")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """What was said about evaluations."""
        return self.of_kind("evaluation")

    @property
    def metric(self) -> str:
        """The one by which the best evaluation was chosen."""
        return str(self.plan.get("metric", "loss"))

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation: the last that was marked so."""
        return next((line for line in reversed(self.evaluations) if line["is_best"]), None)

    @property
    def outcome(self) -> str | None:
        """How the run ended; None while it runs, or where it was killed."""
        return self.starts[-1].get("outcome")

    @property
    def resumed_at(self) -> list[int]:
        """Steps after which the run went on."""
        return [line["step"] for line in self.of_kind("start") if line["step"] > 0]

    @property
    def loss_parts(self) -> list[str]:
        """Names of the parts of the training loss; "loss" where it has but one."""
        names: dict[str, None] = {}
        for line in self.steps:
            names.update(dict.fromkeys(line["losses"]))
        parts = [name for name in names if name != "loss"]
        return parts or list(names)

    @property
    def metric_names(self) -> list[str]:
        """Metrics of the evaluations that are no losses and no constants, the one that counts first."""
        names: dict[str, None] = {}
        for line in self.evaluations:
            names.update(dict.fromkeys(line["metrics"]))
        left_out = {"loss", *LEVELS, *self.loss_parts}
        return sorted((name for name in names if name not in left_out), key=lambda name: name != self.metric)

    def step_curve(self, value: Callable[[dict[str, Any]], float | None]) -> Curve:
        """A figure of the steps, where there is one."""
        return _curve(self.steps, value)

    def loss(self, part: str) -> Curve:
        """A part of the training loss."""
        return self.step_curve(lambda line: line["losses"].get(part))

    def evaluated(self, name: str) -> Curve:
        """A metric of the evaluations."""
        return _curve(self.evaluations, lambda line: line["metrics"].get(name))


@contextmanager
def _damaged(place: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise SourceError(f"{place}: {error}") from None


def _curve(lines: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float | None]) -> Curve:
    points = [(line["step"], found) for line in lines if (found := value(line)) is not None]
    return Curve(tuple(step for step, _ in points), tuple(float(found) for _, found in points))


def smoothed(curve: Curve, reach: int) -> Curve:
    """Means over the points from `reach` before to `reach` after each; what is not finite stays so.

    At the beginning the window is as short after a point as before it, so that a steep curve is not drawn aside; at the
    end, where curves are flat, it is cut off after the last.
    """
    values = np.array(curve.values)
    places, is_finite = np.arange(len(values)), np.isfinite(values)
    totals = np.concatenate([[0.0], np.cumsum(np.where(is_finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_finite)])
    before = np.minimum(reach, places)
    first, stop = places - before, np.minimum(places + before + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (totals[stop] - totals[first]) / (counts[stop] - counts[first])
    return Curve(curve.steps, tuple(np.where(is_finite, means, np.nan).tolist()))


# What run.json and metrics.jsonl must hold, for a page to be made of them.
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


_Kinds = Mapping[str, tuple[Callable[[Any], bool], str]]

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

_PLAN: _Kinds = {
    "task": _TEXT, "model": _TEXT, "config": _MAPPING, "steps": _COUNT, "num_parameters": _COUNT,
    "num_examples": _COUNT, "num_valid_examples": _COUNT,
}  # fmt: skip
_START: _Kinds = {
    "time": _TIME, "first_step": _COUNT, "command": _TEXT, "directory": _TEXT, "versions": _MAPPING,
    "machine": _MAPPING,
}  # fmt: skip
_MACHINE: _Kinds = {"device": _TEXT, "processes": _COUNT, "processor": _TEXT, "cores": _COUNT, "system": _TEXT}
_STEP: _Kinds = {
    "losses": _NUMBERS, "tokens": _NUMBER, "capacity_tokens": _NUMBER, "seconds": _NUMBER, "wait_seconds": _NUMBER,
    "epoch": _NUMBER, "memory_bytes": _NUMBER, "learning_rate": _MEASURED, "grad_norm": _MEASURED,
}  # fmt: skip
_EVALUATION: _Kinds = {"metrics": _NUMBERS, "epoch": _NUMBER, "seconds": _NUMBER, "is_best": _FLAG}
_LINES: Mapping[str, _Kinds] = {"step": _STEP, "evaluation": _EVALUATION, "note": {"text": _TEXT}}
_ALSO: _Kinds = {"tokens_per_s": _MEASURED, "mfu": _MEASURED}  # in lines of steps since they are written


def _check_plan(plan: Mapping[str, Any]) -> None:
    """Raises ValueError unless a plan's fields are there and of their kinds; the message names the field."""
    _check(plan, _PLAN)


def _check_start(start: Any) -> None:
    """Likewise, one of the starts of run.json."""
    if not isinstance(start, dict):
        raise ValueError(f"expected an object, got {type(start).__name__}")
    _check(start, _START)
    _check(start["machine"], _MACHINE)
    if start.get("ended") is not None:
        _check(start, {"ended": _TIME, "outcome": _TEXT})


def _check_line(line: Mapping[str, Any]) -> None:
    """Likewise, a line of metrics.jsonl, after its kind."""
    kind = line["kind"]
    if not isinstance(kind, str):
        raise ValueError(f"kind: expected a text, got {reprlib.repr(kind)}")
    _check(line, _LINES.get(kind, {}))
    _check(line, {name: wanted for name, wanted in _ALSO.items() if name in line})


def _check(record: Mapping[str, Any], kinds: _Kinds) -> None:
    for name, (is_right, wanted) in kinds.items():
        if name not in record:
            raise ValueError(f"{name}: is missing")
        if not is_right(record[name]):
            raise ValueError(f"{name}: expected {wanted}, got {reprlib.repr(record[name])}")
