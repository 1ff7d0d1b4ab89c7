"""`Setup`: what a `Trainer` has made ready for its runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from bert_fast.training.config import TrainingConfig
from bert_fast.training.events import Observer
from bert_fast.training.processes import Processes
from bert_fast.training.task import Task

__all__ = ["Setup"]


@dataclass(frozen=True)
class Setup:
    """A task, how to train on it, and everything that takes part, on its device.

    model: what is saved and judged. prepared: what is called in training, with autocast and gradient exchange.
    observers: in the main process only. evaluate: loss and metrics over the task's examples to judge by.
    tokenizer, settings: kept beside the weights, as `Trainer` explains them.
    """

    task: Task
    config: TrainingConfig
    model: Any
    prepared: nn.Module
    optimizer: Any
    processes: Processes
    observers: list[Observer]
    evaluate: Callable[[], dict[str, float]]
    tokenizer: Any
    settings: dict[str, Any]
