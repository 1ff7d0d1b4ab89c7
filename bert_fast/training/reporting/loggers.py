"""What a run did, line by line: metrics.jsonl, the truth that plots and reports are drawn from; TensorBoard's log."""

import json
import math
import reprlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_fast.errors import SourceError
from bert_fast.files import path_name, write_atomically
from bert_fast.training.observers import Evaluation, Observer, Plan, Step
from bert_fast.training.reporting.flops import model_flops_utilisation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["MetricsLog", "TensorBoardLog", "read_metrics"]


class MetricsLog(Observer):
    """Writes one JSON object a line, each as soon as it is known. All have `kind`, `step` and `time` (Unix, seconds):

        start        a run begins or goes on: device, num_processes
        step         the fields of `observers.Step`, tokens_per_s, and mfu (null where the device's peak is not known)
        evaluation   the fields of `observers.Evaluation`
        checkpoint   path
        note         text
        end          outcome

    Numbers that JSON does not have (NaN, infinity) are null. A run that goes on from step s drops the lines of later
    steps, which it makes again; a run from the beginning starts a new file.

    Args:
        path: the file; its directory is made if missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path_name("path", path))
        self._plan: Plan | None = None
        self._step = 0

    def start(self, plan: Plan) -> None:
        """Drops what this run will do again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if plan.first_step > 0 and self.path.exists():
            kept = [line for line in _lines(self.path) if line["step"] <= plan.first_step]
        text = "".join(map(_encoded, kept)).encode(errors="backslashreplace")
        write_atomically(self.path, lambda temporary: temporary.write_bytes(text))
        self._plan, self._step = plan, plan.first_step
        self._write("start", device=plan.device, num_processes=plan.num_processes)

    def step(self, step: Step) -> None:
        """Writes a line."""
        assert self._plan is not None
        self._step = step.step
        speed = step.tokens / step.seconds if step.seconds > 0 else None
        self._write("step", **asdict(step), tokens_per_s=speed, mfu=model_flops_utilisation(self._plan, step))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Writes a line."""
        self._step = evaluation.step
        self._write("evaluation", **asdict(evaluation))

    def checkpoint(self, step: int, path: Path) -> None:
        """Writes a line."""
        self._write("checkpoint", step=step, path=str(path))

    def note(self, text: str) -> None:
        """Writes a line; before the start, which decides what becomes of the file, there is nowhere to write it."""
        if self._plan is not None:
            self._write("note", text=text)

    def end(self, outcome: str) -> None:
        """Writes the last line of a run that had begun."""
        if self._plan is not None:
            self._write("end", outcome=outcome)

    def _write(self, kind: str, **values: Any) -> None:
        line = _encoded({"kind": kind, "step": self._step, "time": round(time.time(), 3), **values})
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in the order they were written; losses and metrics that were not finite are NaN.

    A last line that was cut off (the machine went down while it was written) is left out.

    Raises:
        SourceError: the file is missing, or a line before the last is damaged; the message names it.
    """
    lines = _lines(Path(path_name("path", path)))
    for line in lines:
        for group in (line.get("losses"), line.get("metrics")):
            if isinstance(group, dict):
                group.update({name: math.nan for name, value in group.items() if value is None})
    return lines


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        rows = path.read_bytes().split(b"\n")
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    lines = []
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        try:
            line = json.loads(row)
            if not isinstance(line, dict) or not {"kind", "step", "time"} <= line.keys():
                raise ValueError("expected an object with kind, step and time")
            step = line["step"]
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 63:
                raise ValueError(f"step: expected a whole number from 0 on, got {reprlib.repr(step)}")
        except (ValueError, RecursionError) as error:  # neither UTF-8 nor JSON, or another shape
            if number == len(rows):  # no line end follows: it was being written
                break
            raise SourceError(f"{path}: line {number}: {error}") from error
        lines.append(line)
    return lines


def _encoded(line: dict[str, Any]) -> str:
    return json.dumps(_finite(line), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


class TensorBoardLog(Observer):
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
