"""`ProgressLine`: how far a run is, on one line of the terminal; evaluations and notes stay above it."""

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from bert_fast.terminal import Part, StatusLine
from bert_fast.training.observers import LEVELS, Evaluation, Observer, Plan, Step
from bert_fast.training.reporting.flops import model_flops_utilisation
from bert_fast.training.reporting.formatting import count, duration, losses, memory, number, numbered, percent, rate

__all__ = ["ProgressLine"]

_WINDOW = 50  # reports that the time left is estimated from


class ProgressLine(Observer):
    """Writes to the terminal: a `StatusLine`.

    Args:
        stream: default stderr.
        clock: seconds, from any beginning.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = StatusLine(stream, clock)
        self._clock = clock
        self._plan: Plan | None = None
        self._began = 0.0
        self._step, self._steps = 0, 1
        self._best: Evaluation | None = None
        self._marks: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def start(self, plan: Plan) -> None:
        """Says what is going to happen."""
        self._plan, self._step, self._steps, self._best = plan, plan.first_step, max(plan.steps, 1), None
        self._began = self._clock()
        self._marks.clear()
        self._marks.append((plan.first_step, self._began))
        self._line.say(
            f"{plan.task}: {plan.model}, {count(plan.num_parameters)} parameters, on {_devices(plan)}, "
            f"{plan.config.get('precision', 'fp32')}",
            "bold",
        )
        self._line.say(
            f"{plan.num_examples:,} examples, {plan.num_valid_examples:,} for validation; {plan.steps:,} steps, "
            f"{plan.steps_per_epoch:,} an epoch; everything goes to {plan.output_dir}"
        )
        if plan.classes:
            self._line.say(f"classes: {numbered(plan.classes)}")
        if self._line.lacks_rich:
            self._line.say("(a line that is drawn over comes with rich: pip install bert_fast[train])")
        self._line.open(f"step {plan.first_step:,}/{plan.steps:,}")

    def step(self, step: Step) -> None:
        """Draws the line anew."""
        self._step = step.step
        self._marks.append((step.step, self._clock()))
        self._line.show(self._parts(step), step.step / self._steps, is_last=step.step == self._steps)

    def evaluating(self, done: int, batches: int) -> None:
        """Draws how far an evaluation is, in place of the speed of steps."""
        if self._plan is None:  # of a model that is not in training
            return
        parts = [
            Part(f"step {self._step:,}/{self._steps:,}", 0, "bold"),
            Part(f"evaluating, {percent(done / batches)} of {batches:,} batches", 1, "cyan"),
        ]
        self._line.show(parts, self._step / self._steps)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Says what came out, the metric that counts first."""
        plan = self._plan
        assert plan is not None
        if evaluation.is_best:
            self._best = evaluation
        names = [name for name in evaluation.metrics if name not in LEVELS]  # the same every time
        names.sort(key=lambda name: (name != plan.metric, name != "loss"))
        shown = ", ".join(f"{name} {number(evaluation.metrics[name])}" for name in names)
        best = ", the best so far" if evaluation.is_best else ""
        self._line.say(f"step {evaluation.step:,}: {shown}{best}", "green" if evaluation.is_best else "cyan")

    def note(self, text: str) -> None:
        """Says it."""
        self._line.say(text, "yellow")

    def end(self, outcome: str) -> None:
        """Says how it ended."""
        self._line.close()
        plan, self._plan = self._plan, None
        if plan is None:  # refused before its start: who asked for it is told by the error
            return
        done = f"{outcome} at step {self._step:,} of {plan.steps:,}, after {duration(self._clock() - self._began)}"
        if self._best is not None and plan.metric in self._best.metrics:
            done += f"; best {plan.metric} {number(self._best.metrics[plan.metric])} at step {self._best.step:,}"
        self._line.say(done, "bold")

    def _parts(self, step: Step) -> list[Part]:
        """The line's pieces, from left to right."""
        assert self._plan is not None
        share = step.step / self._steps
        total, in_parts = losses(step.losses)
        parts = [
            Part(f"step {step.step:,}/{self._steps:,}", 0, "bold"),
            Part(f"{100 * share:.0f} %", 3),
            Part(f"epoch {step.epoch:.2f}", 7),
            Part(total, 1, "green"),
        ]
        if in_parts:
            parts.append(Part(in_parts, 6))
        if step.seconds > 0:
            parts.append(Part(rate(step.tokens / step.seconds), 2, "cyan"))
        mfu = model_flops_utilisation(self._plan, step)
        if mfu is not None:
            parts.append(Part(f"MFU {percent(mfu)}", 5, "cyan"))
        if step.seconds > 0 and step.wait_seconds > 0.1 * step.seconds:
            parts.append(Part(f"{percent(step.wait_seconds / step.seconds)} waiting for data", 5, "yellow"))
        left = self._seconds_left(step)
        if left is not None:
            parts.append(Part(f"{duration(left)} left", 4))
        parts.append(Part(memory(step.memory_bytes), 8))
        return parts

    def _seconds_left(self, step: Step) -> float | None:
        """At the pace of the last reports, evaluations and checkpoints among them."""
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        if step.step >= self._steps or last == first:
            return None
        return (self._steps - last) * (now - then) / (last - first)


def _devices(plan: Plan) -> str:
    return plan.device if plan.num_processes == 1 else f"{plan.num_processes} processes, {plan.device} each"
