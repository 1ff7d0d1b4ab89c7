"""The loss of a step, and what a model says of examples, however they are cut into batches and over processes.

For each part of the loss it is the mean over all labels.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert_fast.models.losses import class_loss

_IGNORED = -100


def label_counts(batch: Mapping[str, Any], predicts_next: bool = False) -> dict[str, int]:
    """How many labels each part of a batch's loss is the mean of: {part: number}; {} of a batch without labels.

    The part is "loss"; of pre-training on pairs of texts there are two, "masked_lm" and "next_sentence". Labels of
    -100 do not count, nor do answers that begin behind the end of their sequence. Look at batches on the host: a device
    would be waited for.

    predicts_next: each word is predicted by those before it, so that a sequence's first label does not count.
    """
    starts, labels = batch.get("start_positions"), batch.get("labels")
    if starts is not None:
        ends = batch["cu_seqlens"].diff() if "cu_seqlens" in batch else batch["input_ids"].shape[1]
        return {"loss": int((starts.flatten() < ends).sum())}
    if labels is None:
        return {}
    if labels.is_floating_point():
        return {"loss": len(labels)}
    counts = labels != _IGNORED
    if predicts_next and "cu_seqlens" in batch:
        counts = counts.clone()
        counts[batch["cu_seqlens"][:-1].long()] = False
    elif predicts_next:
        counts = counts[:, 1:]
    if "next_sentence_label" in batch:
        follows = batch["next_sentence_label"] != _IGNORED
        return {"masked_lm": int(counts.sum()), "next_sentence": int(follows.sum())}
    return {"loss": int(counts.sum())}


def loss_parts(outputs: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parts of a batch's loss as `label_counts` names them, each a mean (Tensor []).

    A model for pre-training returns their sum; the loss of the pairs is taken off it.

    Raises: ValueError: the model returned no loss.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if loss is None:
        raise ValueError(f"model: expected a loss, got {', '.join(outputs)} for a batch of {', '.join(batch)}")
    if "next_sentence_label" not in batch:
        return {"loss": loss}
    pairs = class_loss(outputs["seq_relationship_logits"], batch["next_sentence_label"], "next_sentence_label")
    return {"masked_lm": loss - pairs, "next_sentence": pairs}


def means(everyone: list[dict[str, tuple[float, int]]]) -> dict[str, float]:
    """The parts of the loss over all labels of all processes, and their sum, "loss"."""
    names = sorted({name for one in everyone for name in one})
    sums = [[one[name] for one in everyone if name in one] for name in names]
    parts = {
        name: sum(total for total, _ in several) / max(sum(count for _, count in several), 1)
        for name, several in zip(names, sums, strict=True)
    }
    return parts and {"loss": sum(parts.values())} | parts


def on_host(value: Tensor) -> np.ndarray:
    """The numbers of a tensor; half precision becomes fp32."""
    value = value.detach()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).cpu().numpy()


def joined(found: list[tuple[int, list[np.ndarray], list[np.ndarray]]], which: int) -> Any:
    """Arrays over all batches in their order: one, a tuple of several, or None."""
    ordered: list[Any] = [one[which] for one in sorted(found, key=lambda one: one[0])]
    if not ordered or not ordered[0]:
        return None
    try:
        return alone([np.concatenate(arrays) for arrays in zip(*ordered, strict=True)])
    except ValueError as error:
        raise ValueError(
            f"data_collator: expected batches whose outputs can be joined, as those of PackedCollator: {error}"
        ) from None


def alone(values: list[Any]) -> Any:
    """A single value by itself, several as a tuple."""
    return values[0] if len(values) == 1 else tuple(values)
