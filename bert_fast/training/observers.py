"""What a training run tells those who watch it (`Plan`, `Step`, `Evaluation`), and `Observer`, who is told."""

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol

import torch
from torch import Tensor

from bert_fast.training.distributed import Processes
from bert_fast.training.loader import MicroBatch

__all__ = ["LEVELS", "Evaluation", "Observer", "Plan", "Step", "Tally", "tell"]

# What losses of masked words are compared with, by the metric's name, and what guessing gives them.
LEVELS = {"unigram_entropy": "word frequencies", "context_free_loss": "without context"}

_P = ParamSpec("_P")


@dataclass(frozen=True)
class Plan:
    """A run before its first step.

    task, model: names. num_parameters: of the model. config: the run's configuration as plain values. device: in words.
    flops_per_token: of forward and backward at length 0; flops_per_square: what each pair of tokens of one sequence
    adds (multiply and add count as two; Chowdhery et al. 2022, arXiv:2204.02311, appendix B). classes: the names of 0,
    1, ... where the task has any.
    """

    task: str
    model: str
    output_dir: Path
    config: dict[str, Any]
    num_parameters: int
    num_examples: int
    num_valid_examples: int
    steps: int
    steps_per_epoch: int
    first_step: int  # > 0 where the run goes on from a checkpoint
    num_processes: int
    device: str
    flops_per_token: float
    flops_per_square: float
    metric: str
    higher_is_better: bool
    classes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One optimizer step, over all processes; told every `log_every` steps, and then about the steps since the last.

    Means and sums are over those steps: losses (by part, and "loss", their sum), tokens (without padding), squares (sum
    of squared lengths), sequences, capacity_tokens (what the batches had room for), seconds, wait_seconds (of them
    spent waiting for a batch). step counts from 1. epoch is a fraction: 1.5 is the middle of the second.
    """

    step: int
    epoch: float
    num_steps: int
    losses: dict[str, float]
    learning_rate: float
    grad_norm: float | None
    tokens: int
    squares: int
    sequences: int
    capacity_tokens: int
    seconds: float
    wait_seconds: float
    memory_bytes: int  # greatest so far: of the device, on a CPU of the process


@dataclass(frozen=True)
class Evaluation:
    """Metrics over the examples to judge by, after a step; "loss" and the parts of the loss are among them.

    So may be `LEVELS`, constants of the examples to compare losses with.
    """

    step: int
    epoch: float
    metrics: dict[str, float] = field(default_factory=dict)
    is_best: bool = False
    seconds: float = 0.0
    tokens: int = 0


class Observer(Protocol):
    """Is told, in the main process, what happens. The base of observers that care for some of it.

    An object of any class with these methods is an observer, too. They say `return` since type checkers take methods of
    a protocol without a body for abstract ones.
    """

    def start(self, plan: Plan) -> None:
        """Before the first step, also of a run that goes on."""
        return

    def step(self, step: Step) -> None:
        """After every `log_every` steps and the last."""
        return

    def evaluating(self, done: int, batches: int) -> None:
        """While a model is run over examples, after every batch of this process: so many of all are done."""
        return

    def evaluation(self, evaluation: Evaluation) -> None:
        """After an evaluation."""
        return

    def checkpoint(self, step: int, path: Path) -> None:
        """After a checkpoint was written."""
        return

    def note(self, text: str) -> None:
        """Something that a person should know: going on from a checkpoint, stopping early, a signal."""
        return

    def end(self, outcome: str) -> None:
        """After the last step: "finished", "stopped early", "interrupted" or "failed: ..."."""
        return


class Tally:
    """Sums over the steps since the last report; losses stay on the device until then."""

    def __init__(self, processes: Processes, batch_tokens: int | None) -> None:
        self._processes = processes
        self._batch_tokens = batch_tokens
        self._clear()

    def _clear(self) -> None:
        self.num_steps = 0
        self._losses: dict[str, Tensor] = {}
        self._counts = {"tokens": 0, "squares": 0, "sequences": 0, "capacity": 0}
        self._wait = 0.0
        self._began = time.perf_counter()

    def count(self, batches: Sequence[MicroBatch], wait: float) -> None:
        """The batches of one more step, still on the host, and the seconds waited for them."""
        self._wait += wait
        for batch in (one.batch for one in batches if not one.place.is_spare):
            lengths = batch["cu_seqlens"].diff().long()
            self._counts["tokens"] += len(batch["input_ids"])
            self._counts["squares"] += int((lengths * lengths).sum())
            self._counts["sequences"] += batch.num_sequences
            self._counts["capacity"] += self._batch_tokens or batch.num_sequences * batch["max_seqlen"]

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """The step's weighted parts of the loss in this process, on its device."""
        self.num_steps += 1
        for name, value in losses.items():
            self._losses[name] = self._losses[name] + value if name in self._losses else value

    def report(
        self, step: int, epoch: float, learning_rate: float, grad_norm: Tensor | None, paused_seconds: float
    ) -> Step:
        """All processes' sums since the last report, as one event; begins anew.

        paused_seconds: of evaluations and checkpoints in between, which are not counted.
        """
        names = sorted(self._losses)
        values = torch.stack([self._losses[name] for name in names]).tolist()  # the one sync
        own = {f"loss of {name}": value for name, value in zip(names, values, strict=True)}
        sums = self._processes.sums(own | self._counts | {"wait": self._wait})
        losses = {name: sums[f"loss of {name}"] / self._processes.count / self.num_steps for name in names}
        event = Step(
            step=step,
            epoch=epoch,
            num_steps=self.num_steps,
            losses=losses if set(losses) == {"loss"} else losses | {"loss": sum(losses.values())},
            learning_rate=learning_rate,
            grad_norm=None if grad_norm is None else float(grad_norm),
            tokens=round(sums["tokens"]),
            squares=round(sums["squares"]),
            sequences=round(sums["sequences"]),
            capacity_tokens=round(sums["capacity"]),
            seconds=max(time.perf_counter() - self._began - paused_seconds, 1e-9),
            wait_seconds=sums["wait"] / self._processes.count,
            memory_bytes=_memory_bytes(self._processes.device),
        )
        self._clear()
        return event


def tell(
    observers: Sequence[Observer],
    method: Callable[Concatenate[Observer, _P], None],
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> None:
    """Calls a method of `Observer`, such as `Observer.step`, of every observer, with these arguments."""
    for observer in observers:
        getattr(observer, method.__name__)(*args, **kwargs)


def _memory_bytes(device: torch.device) -> int:
    """The most that was in use so far: of the device's memory, on a CPU of the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
