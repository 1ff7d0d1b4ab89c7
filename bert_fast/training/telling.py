"""What is counted while a run goes on, and told to its observers in the main process."""

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bert_fast.training.events import Evaluation, Observer, Plan, Step
from bert_fast.training.loader import MicroBatch
from bert_fast.training.processes import Processes

__all__ = ["Tally", "Teller"]


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


class Teller:
    """Tells every observer."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def start(self, plan: Plan) -> None:
        """See `Observer`."""
        self._all("start", plan)

    def step(self, step: Step) -> None:
        """See `Observer`."""
        self._all("step", step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """See `Observer`."""
        self._all("evaluation", evaluation)

    def checkpoint(self, step: int, path: Any) -> None:
        """See `Observer`."""
        self._all("checkpoint", step, path)

    def note(self, text: str) -> None:
        """See `Observer`."""
        self._all("note", text)

    def end(self, outcome: str) -> None:
        """See `Observer`."""
        self._all("end", outcome)

    def _all(self, name: str, *arguments: Any) -> None:
        for observer in self._observers:
            getattr(observer, name)(*arguments)


def _memory_bytes(device: torch.device) -> int:
    """The most that was in use so far: of the device's memory, on a CPU of the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
