"""What ends a run before its time: signals, numbers that are not finite, missing memory, lost processes."""

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from bert_fast.errors import TrainingError
from bert_fast.training.checkpoints import replace_directory, save_data
from bert_fast.training.distributed import Processes, lost_process
from bert_fast.training.loader import MicroBatch

__all__ = ["FiniteWatch", "StopSignals", "explained", "smaller_steps"]

Examples = Callable[[MicroBatch], list[int]]  # which examples a micro-batch holds


class FiniteWatch:
    """Sees that losses and gradients are finite numbers, without waiting for a GPU at every step.

    directory: where the batches of a step that went wrong are saved. examples: which ones they held.
    """

    def __init__(self, directory: Path, processes: Processes, examples: Examples) -> None:
        self._directory, self._processes, self._examples = directory, processes, examples
        self._first_bad: Tensor | None = None
        self._batches: dict[int, list[MicroBatch]] = {}

    def note(self, step: int, values: Sequence[Tensor], batches: list[MicroBatch]) -> None:
        """A step's loss and gradient norm (Tensors []), to be looked at later."""
        good = torch.stack([torch.isfinite(value) for value in values]).all()
        bad = torch.where(good, math.inf, float(step))
        self._first_bad = bad if self._first_bad is None else torch.minimum(self._first_bad, bad)
        self._batches[step] = batches

    def look(self, going_on: str) -> None:
        """Looks at all steps noted since the last look; on a GPU this waits for them. Every process calls it.

        going_on: where a run can go on, for the message.

        Raises: TrainingError if one of them, in any process, was not finite; its batches are saved first.
        """
        first = math.inf if self._first_bad is None else float(self._first_bad)
        batches, self._first_bad, self._batches = self._batches, None, {}
        if not self._processes.sums({"bad": float(first < math.inf)})["bad"]:
            return
        reason = "loss or gradient is not a finite number"
        if first == math.inf:
            raise TrainingError(f"{reason} in another process; {going_on}")
        step = int(first)
        where = self._directory / f"step-{step:08d}-process-{self._processes.rank}"
        _save_batches(where, {"step": step, "reason": reason}, batches[step], self._examples)
        raise TrainingError(
            f"step {step}: {reason}; its batches are in {where}; {going_on}. Lower learning_rate, lengthen warmup, or "
            "look at the examples that batches.json names"
        )


@contextmanager
def explained(what: str, advice: Callable[[], str]) -> Iterator[None]:
    """Errors of memory, and of processes that are gone, become a TrainingError that says what can be done.

    what: was tried, such as "step 7". advice: what there was no memory for, and what takes less.
    """
    try:
        yield
    except TrainingError:
        raise
    except (MemoryError, RuntimeError) as error:
        lost = lost_process(error)
        if lost is not None:
            raise TrainingError(f"{what}: {lost}") from error
        if not _is_about_memory(error):
            raise
        text = str(error).strip() or type(error).__name__
        raise TrainingError(
            f"{what}: out of memory {advice()}; then start again: the run goes on from its last checkpoint "
            f"({text.splitlines()[0][:200]})"
        ) from error


def smaller_steps(batches: Sequence[MicroBatch]) -> str:
    """What a step without memory was, and what makes it smaller."""
    largest = max((len(one.batch["input_ids"]) for one in batches), default=0)
    longest = max((one.batch["max_seqlen"] for one in batches), default=0)
    sequences = max((one.batch.num_sequences for one in batches), default=0)
    return (
        f"with {largest} tokens in {sequences} sequences of at most {longest} in a batch. Lower batch_tokens or "
        "batch_size and raise gradient_accumulation by as much (the steps stay the same), or set "
        "gradient_checkpointing, precision bf16, or a smaller max_length"
    )


def _save_batches(
    directory: Path, record: Mapping[str, object], batches: Sequence[MicroBatch], examples: Examples
) -> None:
    """Writes batches and where they come from.

    batch-0.pt, batch-1.pt, ...: what the model was given, for `torch.load(..., weights_only=True)`; batches.json: their
    epoch, number and examples.
    """
    sources = [
        {"epoch": one.place.epoch, "number": one.place.number, "examples": examples(one)} for one in batches
    ]  # fmt: skip
    with replace_directory(directory) as folder:
        for number, one in enumerate(batches):
            save_data(folder / f"batch-{number}.pt", dict(one.batch))
        text = json.dumps({**record, "batches": sources}, indent=1) + "\n"
        (folder / "batches.json").write_text(text, encoding="utf-8")


def _is_about_memory(error: BaseException) -> bool:
    words = ("not enough memory", "can't allocate memory", "out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error).lower() for word in words)


class StopSignals:
    """While it is entered, the first SIGTERM or SIGINT is only noted: `received` is then its name.

    A second one does what it did before: SIGINT raises KeyboardInterrupt. Outside the main thread, where Python allows
    no handlers, nothing is noted.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in self._SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, self._before[signal.Signals(number)])
            os.kill(os.getpid(), number)
        else:
            self.received = signal.Signals(number).name
