"""`RunRecord`: what run.json and metrics.jsonl say about a run, ready to be drawn."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_fast.errors import SourceError
from bert_fast.training.reporting.fields import check_line, check_plan, check_start
from bert_fast.training.reporting.metrics_log import read_metrics
from bert_fast.training.reporting.run_directory import RunDirectory

__all__ = ["Curve", "RunRecord", "smoothed", "thinned"]

_MAX_POINTS = 600  # of a curve: more than the page has pixels for


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
        plan: the fields of `events.Plan`, of the last start.
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
            check_plan(stored["plan"])
        for number, start in enumerate(stored["starts"]):
            with _damaged(f"{directory.run_json}: starts[{number}]"):
                check_start(start)
        lines = read_metrics(directory.metrics) if directory.metrics.exists() else []
        for line in lines:
            with _damaged(f"{directory.metrics}: {line['kind']} at step {line['step']}"):
                check_line(line)
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
        left_out = {"loss", "unigram_entropy", *self.loss_parts}
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


def thinned(curve: Curve) -> Curve:
    """The curve with at most some hundred points: means of neighbours; a value that is not finite is kept as such."""
    size = math.ceil(len(curve) / _MAX_POINTS)
    if size < 2:
        return curve
    blocks = range(0, len(curve), size)
    return Curve(
        tuple(curve.steps[min(start + size, len(curve)) - 1] for start in blocks),
        tuple(_mean(curve.values[start : start + size]) for start in blocks),
    )


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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
