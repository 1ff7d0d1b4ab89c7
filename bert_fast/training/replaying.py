"""Forward and backward of a Trainer's batches, replayed as CUDA graphs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.data.batches import Batches
from bert_fast.errors import BackendError
from bert_fast.graphs import Budget, CapturedStep, budgets_for
from bert_fast.models import BertPreTrainedModel

_BATCHES_LOOKED_AT = 10_000  # for the sizes of budgets
_LEFT_OUT = {"labels": -100}  # of what fills batches up, for models without loss_mask
_NUMBERS = ("regression", "multi_label_classification")  # no value of their labels is left out


class Replayed:
    """Adds up the gradients of batches; a graph is captured for each budget (see `graphs.CapturedStep`).

    What a graph reads and writes stays where it is: the weights of the loss are tensors on the device, and a parameter
    gets the same gradient back after `zero_grad` has taken it away, set to 0. Make it when the weights of a checkpoint
    are in the model.

    backward: calls the model with a batch and the weights of its loss's parts, runs backward, returns the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        backward: Callable[[dict[str, Any], Mapping[str, Tensor]], Tensor],
        budgets: Sequence[Budget],
        device: torch.device,
    ) -> None:
        self._parameters, self._backward, self._device = list(model.parameters()), backward, device
        self._gradients: list[Tensor | None] = [None] * len(self._parameters)
        self._weights: dict[str, Tensor] = {}
        fill = None if isinstance(model, BertPreTrainedModel) else _LEFT_OUT
        self._step = CapturedStep(self._captured, budgets, device=device, fill=fill)

    def __call__(self, batch: Mapping[str, Any], weights: Mapping[str, float]) -> Tensor:
        """The loss of a batch (Tensor []), whose gradients are then added to those of the parameters."""
        for name, weight in weights.items():
            if name not in self._weights:
                self._weights[name] = torch.zeros((), device=self._device)
            self._weights[name].fill_(weight)  # an argument of the launch: nothing is copied from the host
        self._give_back()
        loss: Tensor = self._step(batch)
        self._gradients = [p.grad for p in self._parameters]
        return loss.clone()  # the next replay overwrites it

    def _give_back(self) -> None:
        cleared = []
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is None and gradient is not None:
                parameter.grad = gradient
                cleared.append(gradient)
        if cleared:
            torch._foreach_zero_(cleared)

    def _captured(self, batch: dict[str, Any]) -> Tensor:
        """What a graph holds. A copy of a weight in autocast's dtype is neither older nor younger than its replay."""
        had_none = [p.grad is None for p in self._parameters]
        torch.clear_autocast_cache()
        try:
            loss = self._backward(batch, self._weights)
        finally:
            torch.clear_autocast_cache()
        is_new = [none and p.grad is not None for none, p in zip(had_none, self._parameters, strict=True)]
        if any(is_new) and _is_capturing():
            raise BackendError("a parameter has its first gradient in a capture, whose replays would not add it up")
        return loss


def check_replayable(model: nn.Module) -> None:
    """Raises ValueError, naming the argument, for a model whose loss would count what fills a batch up."""
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


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
