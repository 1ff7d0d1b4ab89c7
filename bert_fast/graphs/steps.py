"""Whole training steps as CUDA graphs, one for each budget."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bert_fast.errors import BackendError
from bert_fast.graphs.budgets import Budget, by_work
from bert_fast.graphs.buffers import TokenBuffers, check_batch


def check_device(name: str, device: torch.device | str) -> None:
    """Checks that a device can capture graphs.

    Args:
        name: of the argument.
        device: what is checked.

    Raises:
        BackendError: it cannot.

    Example:
        >>> graphs.check_device("device", "cpu")
        Traceback (most recent call last):
        ...
        bert_fast.errors.BackendError: device: expected a CUDA device (graphs are CUDA's), got cpu
    """
    if torch.device(device).type != "cuda":
        raise BackendError(f"{name}: expected a CUDA device (graphs are CUDA's), got {device}")
    if not torch.cuda.is_available():
        raise BackendError(f"{name}: CUDA graphs need a CUDA device, and torch sees none")


class CapturedStep:
    """A training step that is captured once per budget and replayed from then on.

    Args:
        step: called with the batch (a dict at fixed addresses), does all of a step on one device: forward, backward,
            clipping, optimizer, `zero_grad`; returns tensors (in any nesting of dicts, lists and tuples) or None. What
            it does on the host happens while it is captured and never again: no `.item()`, no printing; a learning rate
            that changes is a tensor on the device, and optimizers are capturable (`optim.AdamW` and `Lamb` are). Losses
            must leave out what fills a batch up (see `TokenBuffers`), as those of all models here do. Give masked words
            by masked_lm_positions: to look for them would sync.
        budgets: a batch takes the first that it fits into, by tokens, then by the longest sequence, then by the number
            of sequences. One that fits into none runs as it is, uncaptured; the first time a warning says why.
        num_warmup: calls of every budget that run as they are, on a side stream, before the capture. They are steps
            like any other: each call is exactly one, on its own batch.
        fill: see `TokenBuffers`. Models that `fuse` changed take no loss_mask: {"labels": -100} where they classify.

    Dropout is fresh in every replay: models draw their seed on the device, from PyTorch's generator, whose state CUDA
    graphs advance. Memory of the graphs of all budgets is shared: what a call returns is overwritten by the next.

    Raises:
        TypeError, ValueError: no budget, or (when called) a batch that is none, or has other entries than the first.
        BackendError: there is no CUDA device; a step that cannot be captured.
    """

    def __init__(
        self,
        step: Callable[[dict[str, Any]], Any],
        budgets: Sequence[Budget],
        *,
        device: torch.device | str = "cuda",
        num_warmup: int = 3,
        fill: Mapping[str, float] | None = None,
    ) -> None:
        if not budgets or not all(isinstance(budget, Budget) for budget in budgets):
            raise ValueError(f"budgets: expected at least one Budget, got {budgets!r}")
        if num_warmup < 1:
            raise ValueError(f"num_warmup: expected at least 1 (libraries set themselves up in it), got {num_warmup}")
        check_device("device", device)
        self.step = step
        self.device = torch.device(device)
        self.num_warmup = num_warmup
        self._fill = fill
        self._runs: dict[Budget, _Run | None] = dict.fromkeys(sorted(budgets, key=by_work))
        self._pool: Any = None
        # One for warming up and capturing: what autograd and libraries keep for a stream is then there.
        self._stream: Any = None
        self._has_warned = False

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """One step on this batch; what `step` returned, at fixed addresses."""
        check_batch(batch)
        budget = self._budget_of(batch)
        if budget is None:
            return self.step({
                name: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
                for name, value in batch.items()
            })  # fmt: skip
        run = self._runs[budget]
        if run is None:
            run = self._runs[budget] = _Run(TokenBuffers(budget, batch, self.device, self._fill))
        inputs = run.buffers.fill(batch)
        if run.graph is None and run.num_calls < self.num_warmup:
            output = self._warm_up(inputs)
            run.num_calls += 1
            return output
        if run.graph is None:
            graph = torch.cuda.CUDAGraph()
            # Of other threads only this one's calls are watched: a loader's may pin memory meanwhile.
            mode = {"pool": self._pool, "stream": self._side_stream(), "capture_error_mode": "thread_local"}
            try:
                with torch.cuda.device(self.device), torch.cuda.graph(graph, **mode):
                    output = self.step(inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise BackendError(f"step: it could not be captured for {budget}: {error}") from error
            # Only now: a step that raised has captured nothing.
            run.graph, run.output, self._pool = graph, output, graph.pool()
        run.graph.replay()
        return run.output

    def _budget_of(self, batch: Mapping[str, Any]) -> Budget | None:
        """The one with the least work that the batch fits into; None, with a warning once, where there is none."""
        reasons = []
        for budget in self._runs:
            against = budget.reasons_against(batch)
            if not against:
                return budget
            reasons.append(f"{budget}: {', '.join(against)}")
        if not self._has_warned:
            self._has_warned = True
            why = "; ".join(reasons)
            warnings.warn(f"batch: it fits into no budget and runs uncaptured: {why}", UserWarning, stacklevel=3)
        return None

    def _side_stream(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def _warm_up(self, inputs: dict[str, Any]) -> Any:
        stream, current = self._side_stream(), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            output = self.step(inputs)
        current.wait_stream(stream)
        return output


@dataclass
class _Run:
    """What belongs to one budget."""

    buffers: TokenBuffers
    num_calls: int = 0
    graph: Any = None
    output: Any = None
