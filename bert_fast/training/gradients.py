"""Forward and backward of micro-batches: as calls, or replayed as CUDA graphs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.data.batches import Batches
from bert_fast.errors import BackendError
from bert_fast.graphs import Budget, CapturedStep, budgets_for
from bert_fast.models import BertPreTrainedModel
from bert_fast.training.distributed import Processes
from bert_fast.training.loader import MicroBatch
from bert_fast.training.task import Task

__all__ = ["Gradients", "ReplayedGradients", "check_replayable", "run_budgets", "total"]

_BATCHES_LOOKED_AT = 10_000  # for the sizes of budgets
_LEFT_OUT = {"labels": -100}  # of what fills batches up, for models without loss_mask
_NUMBERS = ("regression", "multi_label_classification")  # no value of their labels is left out


class Gradients:
    """Adds up the gradients of micro-batches.

    task: says what the loss is. model: as `Processes.prepare` made it; likewise optimizer, whose gradients they are.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: Any, processes: Processes) -> None:
        self.task, self.model, self.optimizer, self.processes = task, model, optimizer, processes

    def add(self, one: MicroBatch, weights: Mapping[str, float]) -> dict[str, Tensor]:
        """Forward and backward of a micro-batch; weights: of the parts of its loss.

        Returns the weighted parts: {part: Tensor []}, without gradients.
        """
        with self.processes.exchanging(self.model, one.place.is_last):
            return self._backward(one.batch.to(self.processes.device, non_blocking=True), weights)

    def clear(self) -> None:
        """After the optimizer's step: the next gradients are sums of their own."""
        self.optimizer.zero_grad()

    def close(self) -> None:
        """After the last step."""

    def _backward(self, batch: Mapping[str, Any], weights: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        parts = self.task.loss_parts(self.model, batch)
        weighted = {name: _times(part, weights[name]) for name, part in parts.items()}
        self.processes.accelerator.backward(total(weighted.values()))
        return {name: part.detach() for name, part in weighted.items()}


class ReplayedGradients(Gradients):
    """The same, replayed as CUDA graphs: one is captured for each budget (see `graphs.CapturedStep`).

    What a graph reads and writes stays where it is: gradients are set to 0 instead of being given back, and the weights
    of the loss are tensors on the device. Make it when the weights of a checkpoint are in the model.
    """

    def __init__(
        self, task: Task, model: nn.Module, optimizer: Any, processes: Processes, budgets: Sequence[Budget]
    ) -> None:
        super().__init__(task, model, optimizer, processes)
        self._parameters = list(model.parameters())
        self._weights: dict[str, Tensor] = {}
        fill = None if isinstance(model, BertPreTrainedModel) else _LEFT_OUT
        self._step = CapturedStep(self._captured, budgets, device=processes.device, fill=fill)

    def add(self, one: MicroBatch, weights: Mapping[str, float]) -> dict[str, Tensor]:
        """See `Gradients.add`."""
        for name, weight in weights.items():
            if name not in self._weights:
                self._weights[name] = torch.zeros((), device=self.processes.device)
            self._weights[name].fill_(weight)  # an argument of the launch: nothing is copied from the host
        # The next replay overwrites what this one returns.
        return {name: part.clone() for name, part in self._step(one.batch).items()}

    def clear(self) -> None:
        """See `Gradients.clear`."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)

    def close(self) -> None:
        """See `Gradients.close`: graphs and gradients give their memory back."""
        del self._step
        self.optimizer.zero_grad()

    def _captured(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """What a graph holds. A copy of a weight in autocast's dtype is neither older nor younger than its replay."""
        had_none = [p.grad is None for p in self._parameters]
        torch.clear_autocast_cache()
        try:
            parts = self._backward(batch, self._weights)
        finally:
            torch.clear_autocast_cache()
        is_new = [none and p.grad is not None for none, p in zip(had_none, self._parameters, strict=True)]
        if any(is_new) and _is_capturing():
            raise BackendError("a parameter has its first gradient in a capture, whose replays would not add it up")
        return parts


def check_replayable(model: nn.Module) -> None:
    """Raises ValueError, naming the setting, for a model whose loss would count what fills a batch up."""
    config: Any = model.config
    is_classifier = any("SequenceClassification" in cls.__name__ for cls in type(model).__mro__)
    kind = config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification")
    if is_classifier and kind in _NUMBERS and not isinstance(model, BertPreTrainedModel):
        raise ValueError(
            f"graphs: expected False for a {type(model).__name__} of transformers with problem_type {kind!r} (it takes "
            "no loss_mask), got True"
        )


def run_budgets(batches: Batches, epochs: int, max_seqlen: int) -> list[Budget]:
    """Budgets for the batches of some epochs, of which up to 10,000 are looked at.

    max_seqlen: tokens of the longest sequence that the model takes.
    """
    sizes: list[tuple[int, ...]] = []
    for epoch in range(epochs):
        sizes += batches.sizes(epoch, _BATCHES_LOOKED_AT - len(sizes))
        if len(sizes) == _BATCHES_LOOKED_AT:
            break
    sizes = [(max(tokens, 1), *others) for tokens, *others in sizes]
    return budgets_for(sizes, min(max_seqlen, batches.budget().max_seqlen))


def total(values: Iterable[Tensor]) -> Tensor:
    """The sum of one value or more."""
    first, *others = values
    for value in others:
        first = first + value
    return first


def _times(part: Tensor, weight: float | Tensor) -> Tensor:
    return part if isinstance(weight, float) and weight == 1 else part * weight


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
