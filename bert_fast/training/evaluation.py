"""Running a model over all examples of a source, shared among processes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bert_fast.data.batches import Batches, Source
from bert_fast.training.distributed import Processes
from bert_fast.training.task import Predictions, Task

__all__ = ["run_over"]


def run_over(
    task: Task,
    model: nn.Module,
    source: Source,
    processes: Processes,
    max_tokens: int,
    watch: Callable[[int, int], None] | None = None,
) -> tuple[Predictions, dict[str, float]]:
    """(what the model says about every example, means of the parts of the loss and their sum, "loss").

    In the main process; others get what their own batches gave. The means are over all labels; {} without labels.

    Args:
        task: how to ask the model.
        model: in the mode that it is to be run in.
        source: the examples; their epoch is 0.
        processes: batch i is worked on by process i modulo their number.
        max_tokens: of a batch; an example that is longer is a batch of its own.
        watch: is told (batches done, of all) after each batch of this process.
    """
    lengths = source.lengths(0)
    predictions = Predictions(lengths)
    batches = Batches(source, max_tokens=max(max_tokens, int(lengths.max(initial=1))), shuffle=False)
    plan = batches.plan(0)
    sums: dict[str, float] = {}
    with torch.inference_mode(not processes.is_sharded), torch.no_grad(), processes.accelerator.autocast():
        # Sharded models need every process in every round: one without a batch runs its first once more.
        for first in range(0, len(plan), processes.count):
            number = first + processes.rank
            is_spare = number >= len(plan)
            if is_spare and not processes.is_sharded:
                continue
            number %= len(plan)
            batch = batches.batch(0, number)
            counts = task.label_counts(batch)
            parts, said = task.predict(model, batch.to(processes.device))
            if is_spare:
                continue
            predictions.add(plan.indices(number), {name: _on_host(value) for name, value in said.items()})
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + float(value) * counts[name]
                sums["labels of " + name] = sums.get("labels of " + name, 0.0) + counts[name]
            if watch is not None:
                watch(min(first + processes.count, len(plan)), len(plan))
    return _joined(predictions, sums, processes)


def _joined(
    predictions: Predictions, sums: dict[str, float], processes: Processes
) -> tuple[Predictions, dict[str, float]]:
    """What all processes found, in the main one."""
    gathered = processes.gathered((predictions.batches(), sums))
    if processes.is_main:
        for batches, _ in gathered[1:]:
            for indices, arrays in batches:
                predictions.add(indices, arrays)
    parts = sorted({name for _, found in gathered for name in found if not name.startswith("labels of ")})
    losses = {}
    for name in parts:
        total, labels = (sum(found.get(key, 0.0) for _, found in gathered) for key in (name, "labels of " + name))
        losses[name] = total / max(labels, 1.0)
    return predictions, losses and losses | {"loss": sum(losses.values())}


def _on_host(value: torch.Tensor) -> Any:
    value = value.detach()
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
