"""`Judge`: what the evaluations of a run decide: which weights are the best, and whether to go on."""

import math
import time
from collections.abc import Callable, Sequence

from bert_fast.training.checkpoints import Progress
from bert_fast.training.config import SettingsError, TrainingConfig
from bert_fast.training.observers import Evaluation, Observer, tell
from bert_fast.training.task import Task

__all__ = ["Judge"]


class Judge:
    """Evaluates, and knows the best evaluation by the metric of the settings, or else of the task.

    task: whose metrics they are. config: best_by, early_stopping. evaluate: loss and metrics over the examples to judge
    by. observers: are told of every evaluation.

    Attributes:
        metric: by which the best evaluation is chosen. higher_is_better: of it.
    """

    def __init__(
        self,
        task: Task,
        config: TrainingConfig,
        evaluate: Callable[[], dict[str, float]],
        observers: Sequence[Observer],
    ) -> None:
        self.task, self._evaluate, self._observers = task, evaluate, observers
        self._patience = config.early_stopping
        self._is_chosen = config.best_by is not None
        self.metric = config.best_by or task.metric
        self.higher_is_better = task.is_better_when_higher(self.metric) if self._is_chosen else task.higher_is_better

    def check(self) -> None:
        """One evaluation of an untrained model, where the settings chose the metric: its names are known by it only.

        Raises: SettingsError: there is no such metric, or nothing to judge by.
        """
        if not self._is_chosen:
            return
        if self.task.valid is None:
            raise SettingsError(f"best_by: expected examples to judge by (valid), got none for {self.metric!r}")
        self._value(self._evaluate())

    def judge(self, progress: Progress, epochs: float) -> tuple[dict[str, float], bool]:
        """(metrics, whether they are the best so far); progress is told. epochs: done, for the observers."""
        began = time.perf_counter()
        assert self.task.valid is not None
        metrics = self._evaluate()
        value, best = self._value(metrics), progress.best_value
        is_best = best is None or _is_better(value, best, self.higher_is_better)
        if is_best:
            progress.best_step, progress.best_value, progress.since_best = progress.step, value, 0
        else:
            progress.since_best += 1
        tokens = int(self.task.valid.lengths(0).sum())
        seconds = time.perf_counter() - began
        evaluation = Evaluation(progress.step, epochs, metrics, is_best, seconds, tokens)
        tell(self._observers, Observer.evaluation, evaluation)
        return metrics, is_best

    def is_hopeless(self, progress: Progress) -> bool:
        """Whether there were as many evaluations without a better one as the settings have patience for."""
        return self._patience is not None and progress.since_best >= self._patience

    def _value(self, metrics: dict[str, float]) -> float:
        value = metrics.get(self.metric)
        if value is None:
            wrong = f"expected one of {', '.join(sorted(metrics))}, got {self.metric!r}"
            if self._is_chosen:
                raise SettingsError(f"best_by: {wrong}")
            raise ValueError(f"metric: {wrong}")
        return value


def _is_better(value: float, best: float, higher_is_better: bool) -> bool:
    """Whether a metric is better than the best one so far; one that is not a number is worse than any that is."""
    if math.isnan(value) or math.isnan(best):
        return not math.isnan(value)
    return value > best if higher_is_better else value < best
