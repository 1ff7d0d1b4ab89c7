"""What a training run tells those who watch it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Evaluation", "Observer", "Plan", "Step"]


@dataclass(frozen=True)
class Plan:
    """A run before its first step.

    task, model: names. num_parameters: of the model. config: the run's configuration as plain values. device: in words.
    flops_per_token: of forward and backward at length 0; flops_per_square: what each pair of tokens of one sequence
    adds (multiply and add count as two; Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
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
    """Metrics over the examples to judge by, after a step; "loss" and the parts of the loss are among them."""

    step: int
    epoch: float
    metrics: dict[str, float] = field(default_factory=dict)
    is_best: bool = False
    seconds: float = 0.0
    tokens: int = 0


class Observer(Protocol):
    """Is told, in the main process, what happens; a run goes on if an observer does nothing."""

    def start(self, plan: Plan) -> None:
        """Before the first step, also of a run that goes on."""

    def step(self, step: Step) -> None:
        """After every `log_every` steps and the last."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """After an evaluation."""

    def checkpoint(self, step: int, path: Path) -> None:
        """After a checkpoint was written."""

    def note(self, text: str) -> None:
        """Something that a person should know: going on from a checkpoint, stopping early, a signal."""

    def end(self, outcome: str) -> None:
        """After the last step: "finished", "stopped early", "interrupted" or "failed: ..."."""
