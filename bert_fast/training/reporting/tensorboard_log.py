"""The curves of a run for TensorBoard."""

from pathlib import Path
from typing import TYPE_CHECKING

from bert_fast.files import path_name
from bert_fast.training.events import Evaluation, Plan, Step
from bert_fast.training.reporting.flops import model_flops_utilisation
from bert_fast.training.reporting.listener import Listener

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLog"]


class TensorBoardLog(Listener):
    """Writes scalars: train/*, valid/* and speed/*, over steps. A run that goes on hides what it will do again.

    Args:
        directory: made if missing.

    Raises:
        ImportError: by `start`, where tensorboard is not installed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = Path(path_name("directory", directory))
        self._writer: SummaryWriter | None = None
        self._plan: Plan | None = None

    def start(self, plan: Plan) -> None:
        """Opens the log."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("tensorboard is not installed: pip install bert_fast[train]") from error
        self._plan = plan
        self._writer = SummaryWriter(str(self._directory), purge_step=plan.first_step + 1)

    def step(self, step: Step) -> None:
        """Losses, learning rate, norm of the gradients, speed."""
        assert self._plan is not None
        values = {f"train/{name}": value for name, value in step.losses.items()}
        values["train/learning_rate"] = step.learning_rate
        if step.grad_norm is not None:
            values["train/grad_norm"] = step.grad_norm
        if step.seconds > 0:
            values["speed/tokens_per_s"] = step.tokens / step.seconds
            values["speed/waiting"] = step.wait_seconds / step.seconds
        mfu = model_flops_utilisation(self._plan, step)
        if mfu is not None:
            values["speed/mfu"] = mfu
        values["speed/memory_bytes"] = step.memory_bytes
        self._add(values, step.step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """The metrics."""
        self._add({f"valid/{name}": value for name, value in evaluation.metrics.items()}, evaluation.step)

    def end(self, outcome: str) -> None:
        """Closes the log."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, values: dict[str, float], step: int) -> None:
        assert self._writer is not None, "start was not called"
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
