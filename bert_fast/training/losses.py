"""A step's loss: for each of its parts the mean over all labels of the step, however the step is cut into batches."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bert_fast.models.losses import class_loss

__all__ = ["label_counts", "loss_parts"]

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
