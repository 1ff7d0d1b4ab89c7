"""Losses of the heads: means over what is labelled, softmax and sums at least in fp32; 0 where nothing is labelled."""

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.checks import check_dtype, check_number, check_same_device, check_shape, check_tensor
from bert_fast.ops.cross_entropy import check_labels, cross_entropy
from bert_fast.ops.packing import Packing
from bert_fast.reference.precision import wide_dtype

IGNORE_INDEX = -100
_INTEGERS = (torch.int64, torch.int32)


def pack_labels(labels: Tensor, packing: Packing) -> Tensor:
    """Labels of tokens, [B, S] (or [T] for packed input), as [T]; those of padding are left out.

    Raises: TypeError, ValueError for labels of another kind or shape.
    """
    check_shape("labels", labels, packing.padded_shape or packing.coords.shape[:1])
    check_dtype("labels", labels, _INTEGERS)
    check_same_device("labels", labels, "the tokens", packing.coords)
    return packing.pack(labels)


def next_token_labels(labels: Tensor, packing: Packing) -> Tensor:
    """Packed labels [T] such that every token has that of the column behind it; -100 where that is not kept."""
    num_tokens = labels.shape[0]
    behind = torch.arange(1, num_tokens + 1, device=labels.device).clamp(max=num_tokens - 1)
    row, position = (packing.coords.index_select(0, behind) - packing.coords).unbind(1)
    return labels.index_select(0, behind).masked_fill((row != 0) | (position != 1), IGNORE_INDEX)


def share_of_step(loss: Tensor, num_labels: Tensor | int, num_items_in_batch: Tensor | float | None) -> Tensor:
    """What a batch adds to the mean over all labels of a step of several batches, as transformers' loss functions do.

    loss: mean over the `num_labels` labels of this batch.
    num_items_in_batch (number, or Tensor with one element): labels of all batches of the step; None: the batch is all.
    Returns: loss * num_labels / num_items_in_batch; 0 where both are 0, the loss too (transformers says NaN).
    Raises: TypeError, ValueError naming num_items_in_batch.
    """
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        check_tensor("num_items_in_batch", num_items_in_batch)
        if num_items_in_batch.numel() != 1:
            shape = list(num_items_in_batch.shape)
            raise ValueError(f"num_items_in_batch: expected one number, got shape {shape}")
        count = num_items_in_batch.to(loss.device, loss.dtype).reshape(())
        return loss * (num_labels / count.masked_fill(count == 0, 1))
    if check_number("num_items_in_batch", num_items_in_batch) < 0:
        raise ValueError(f"num_items_in_batch: expected a number from 0 on, got {num_items_in_batch}")
    if isinstance(num_labels, Tensor):
        num_labels = num_labels.to(loss.dtype)
    return loss * (num_labels / (num_items_in_batch or 1))


def class_loss(
    logits: Tensor, labels: Tensor, name: str = "labels", num_items_in_batch: Tensor | float | None = None
) -> Tensor:
    """Mean cross entropy of logits [N, C] over the rows whose label ([N], or [N, 1]; int) is not -100.

    num_items_in_batch: see `share_of_step`.
    """
    check_tensor(name, labels)
    labels = labels.squeeze(1) if labels.dim() == 2 else labels
    # The op checks too, but does not know what its caller's argument is called.
    check_labels(name, labels, "logits", logits, logits.shape[1], IGNORE_INDEX)
    if logits.shape[1] == 0:  # of sequences without tokens: no label counts
        return logits.sum(dtype=wide_dtype(logits.dtype))
    loss = cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
    return loss if num_items_in_batch is None else share_of_step(loss, num_labelled(labels), num_items_in_batch)


def num_labelled(labels: Tensor) -> Tensor:
    """How many labels are not -100: Tensor []."""
    return (labels != IGNORE_INDEX).sum()


def text_loss(
    logits: Tensor,
    labels: Tensor,
    problem_type: str | None,
    loss_mask: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """The loss of logits [B, C] for classes, several classes at once, or numbers.

    labels: "single_label_classification": Tensor [B] or [B, 1], int; "multi_label_classification": Tensor [B, C] of
        0 and 1; "regression": Tensor [B, C], or [B] where C is 1.
    problem_type: None: one column means regression, integers single-label, other numbers multi-label classification.
    loss_mask (Tensor [B], bool): the rows whose label counts; None: all.
    num_items_in_batch: see `share_of_step`; of several classes at once, every 0 or 1 is an item.

    Raises: TypeError, ValueError for labels that do not fit.
    """
    check_tensor("labels", labels)
    if labels.is_complex():
        raise TypeError(f"labels: expected real numbers, got {str(labels.dtype).removeprefix('torch.')}")
    if problem_type is None:
        classes = "single" if labels.dtype in _INTEGERS else "multi"
        problem_type = "regression" if logits.shape[1] == 1 else f"{classes}_label_classification"
    if loss_mask is not None:
        check_tensor("loss_mask", loss_mask)
        check_shape("loss_mask", loss_mask, (logits.shape[0],))
        check_dtype("loss_mask", loss_mask, (torch.bool,))
        check_same_device("loss_mask", loss_mask, "logits", logits)
    if problem_type == "single_label_classification":
        if loss_mask is not None:
            check_labels("labels", labels.flatten(), "logits", logits, logits.shape[1], IGNORE_INDEX)
            labels = labels.flatten().masked_fill(~loss_mask, IGNORE_INDEX)
        return class_loss(logits, labels, num_items_in_batch=num_items_in_batch)
    if labels.shape != logits.shape[:1] or logits.shape[1] != 1:
        check_shape("labels", labels, tuple(logits.shape))  # mse_loss would broadcast
    check_same_device("labels", labels, "logits", logits)
    scores = logits.to(wide_dtype(logits.dtype))
    targets = labels.view_as(scores).to(scores.dtype)
    if logits.shape[0] == 0:  # PyTorch's mean of nothing is NaN
        return scores.sum()
    loss = F.mse_loss if problem_type == "regression" else F.binary_cross_entropy_with_logits
    if loss_mask is None:
        return share_of_step(loss(scores, targets), scores.numel(), num_items_in_batch)
    counts = loss_mask.unsqueeze(1).expand_as(scores)
    # Where it does not count an element is 0 before anything is made of it: neither it nor its gradient can be NaN.
    losses = loss(scores.where(counts, 0.0), targets.where(counts, 0.0), reduction="none")
    num_labels = counts.sum()
    return share_of_step(losses.where(counts, 0.0).sum() / num_labels.clamp(min=1), num_labels, num_items_in_batch)


def span_labels(positions: Tensor, kept: Tensor, name: str) -> Tensor:
    """Positions of tokens (Tensor [B] or [B, 1], int) as classes of scores [B, S]: int [B].

    kept (Tensor [B, S], bool): the tokens, padding left out. Negative positions mean 0; those that are no kept token
    mean "not in this window" and are -100.
    """
    batch_size, length = kept.shape
    check_tensor(name, positions)
    check_shape(name, positions, (batch_size,) if positions.dim() == 1 else (batch_size, 1))
    check_dtype(name, positions, _INTEGERS)
    check_same_device(name, positions, "the tokens", kept)
    positions = positions.flatten().clamp(0, length)
    is_kept = F.pad(kept, (0, 1)).gather(1, positions.long().unsqueeze(1)).squeeze(1)  # position S is none
    return positions.masked_fill(~is_kept, IGNORE_INDEX)
