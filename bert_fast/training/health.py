"""`Health`: a run's own figures, watched: what is wrong with them, in words, and what to try.

Nothing here changes what a run computes. It knows what was reported since the run began, or last went on.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass

from bert_fast.training.config import TrainingConfig
from bert_fast.training.observers import Evaluation, Step
from bert_fast.training.task import Task

__all__ = ["STALLED_EVALUATIONS", "Health"]

STALLED_EVALUATIONS = 5  # without a fall of the loss: then it is said
_FALL = 0.002  # share of the loss that counts as one
_WINDOW = 5  # reports that are averaged: single ones are as noisy as their batches
_RISE = 1.1  # times the lowest mean of a window
_NOISES = 10.0  # and so many standard errors above it, as the lowest of many is low by chance, too
_NORM_GROWTH = 10.0  # times the lowest median of a window
_ENDING = 0.05  # share of the highest learning rate, below which little is to be expected


@dataclass(frozen=True)
class _Low:
    """The lowest mean loss of a window so far, and where its last report was."""

    loss: float
    step: int


class Health:
    """Says once what is wrong, and again only after it was well in between.

    config: of the run, for names and values in what is said. task: says what it means that its loss does not fall.
    """

    def __init__(self, config: TrainingConfig, task: Task) -> None:
        self._config, self._task = config, task
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._changes: deque[float] = deque(maxlen=8 * _WINDOW)  # of the loss from one report to the next
        self._low: _Low | None = None
        self._low_norm: tuple[float, float] | None = None  # lowest median, mean loss then
        self._has_said_rise = self._has_said_norm = self._has_said_stall = False
        self._best: tuple[float, int, float | None] | None = None  # loss of evaluation, step, training loss then
        self._since_fall = 0
        self._rate = 0.0

    def after_step(self, step: Step) -> list[str]:
        """What a report of the last steps says: the training loss that rises, gradients that grow."""
        loss = step.losses.get("loss", math.nan)
        self._rate = step.learning_rate
        if not math.isfinite(loss):
            return []  # ends the run, with words of its own
        if self._losses:
            self._changes.append(abs(loss - self._losses[-1]))
        self._losses.append(loss)
        if step.grad_norm is not None and math.isfinite(step.grad_norm):
            self._norms.append(step.grad_norm)
        if len(self._losses) < _WINDOW:
            return []
        return [text for text in (self._rise(step.step), self._growth()) if text is not None]

    def after_evaluation(self, evaluation: Evaluation) -> list[str]:
        """What an evaluation says: a loss that has not fallen for several of them."""
        loss = evaluation.metrics.get("loss")
        if loss is None or not math.isfinite(loss):
            return []
        if self._best is None or loss < self._best[0] * (1 - _FALL):
            self._best = (loss, evaluation.step, self._mean)
            self._since_fall, self._has_said_stall = 0, False
            return []
        self._since_fall += 1
        is_ending = self._config.schedule != "constant" and self._rate < _ENDING * self._config.learning_rate
        if self._since_fall < STALLED_EVALUATIONS or self._has_said_stall or is_ending:
            return []
        self._has_said_stall = True
        return [self._stall(loss, evaluation)]

    @property
    def _mean(self) -> float | None:
        return statistics.fmean(self._losses) if self._losses else None

    def _rise(self, step: int) -> str | None:
        mean, low = statistics.fmean(self._losses), self._low
        if low is None or mean < low.loss:
            self._low, self._has_said_rise = _Low(mean, step), False
            return None
        # Differences of noisy values have sqrt(2) times their deviation; the median of |x| is 0.67 of it.
        deviation = statistics.median(self._changes) / (0.67 * math.sqrt(2))
        if mean < _RISE * low.loss or mean < low.loss + _NOISES * deviation / math.sqrt(_WINDOW) or self._has_said_rise:
            return None
        self._has_said_rise = True
        norm = ""
        if self._low_norm is not None and self._norms:
            growth = statistics.median(self._norms) / max(self._low_norm[0], 1e-12)
            norm = f", the gradient norm is {growth:.1f} times its lowest"
        return (
            f"training diverges: its loss was {low.loss:.4g} until step {low.step:,} and is {mean:.4g} now{norm}. "
            f"{self._lower_rate()}"
        )

    def _growth(self) -> str | None:
        if len(self._norms) < _WINDOW:
            return None
        norm, loss = statistics.median(self._norms), statistics.fmean(self._losses)
        if self._low_norm is None or norm < self._low_norm[0]:
            self._low_norm, self._has_said_norm = (norm, loss), False
            return None
        lowest, loss_then = self._low_norm
        # Where the loss fell meanwhile, few hard examples may be all that is left.
        if norm < _NORM_GROWTH * lowest or loss < loss_then or self._has_said_norm:
            return None
        self._has_said_norm = True
        clipped = self._config.max_grad_norm
        limit = "" if clipped is None else f" (clipped to max_grad_norm={clipped:g})"
        return (
            f"the gradient norm grew from {lowest:.3g} to {norm:.3g}{limit}, and the loss did not fall: often the "
            f"first sign that training diverges. {self._lower_rate()}"
        )

    def _lower_rate(self) -> str:
        rate = self._config.learning_rate
        return (
            f"A learning_rate that is ten times too high does this: try {rate / 10:.2g} (it is {rate:.2g} at its "
            f"highest), a longer warmup (it is {self._config.warmup:g}), or larger batches, from the beginning: "
            "what was damaged hardly mends"
        )

    def _stall(self, loss: float, evaluation: Evaluation) -> str:
        assert self._best is not None
        best, step, training_then = self._best
        said = (
            f"the loss of the examples to judge by has not fallen for {self._since_fall} evaluations: it is "
            f"{loss:.4g}, and was {best:.4g} at step {step:,}. "
        )
        training = self._mean
        if training is not None and training_then is not None and training < training_then * (1 - 10 * _FALL):
            return said + (
                f"The training loss still falls ({training_then:.4g} then, {training:.4g} now): the model learns its "
                "examples by heart. Try more examples, fewer steps, more dropout or weight_decay, or early_stopping"
            )
        meaning = self._task.meaning_of_stall(evaluation.metrics)
        rate = self._config.learning_rate
        return said + (meaning or f"Nor does that of training. Try a learning_rate of {rate / 3:.2g} or {rate * 3:.2g}")
