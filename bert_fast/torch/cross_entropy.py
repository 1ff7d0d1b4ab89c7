"""Mean cross entropy from PyTorch's operators, a few rows at a time: their log-probabilities stay in cache.

Operators on whole tensors would write log-probabilities, read them again backward beside a tensor of scattered labels,
and make an fp32 copy of half-precision logits. Here logits are read once forward and once backward, and dlogits is
written once. On the CPU rows without a label are not read; elsewhere picking rows out would cost a device sync, so they
are computed and overwritten.

Backward does not use lse: PyTorch's softmax takes maximum and sum again, in cache, and is half again as fast as its
exp(z - lse), whose exponential is another (200 x 30,522 fp32 scores, one core: 0.44 against 0.70 ns a score).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bert_fast.reference.cross_entropy import CrossEntropy
from bert_fast.reference.precision import wide_dtype

# Scores treated at once, on the CPU by each thread: 1 MB of fp32 stays in a core's second cache, and ten calls cost
# little beside it; a GPU needs enough to be busy (64 MB).
_CPU_SCORES, _OTHER_SCORES = 2**18, 2**24


def cross_entropy_fwd(a: CrossEntropy) -> tuple[Tensor, Tensor]:
    """(loss [], lse [N]), as `reference.cross_entropy`, lse 0 in rows without a label.

    Both are NaN for a label that is neither a class nor ignore_index.
    """
    logits, labels, ignore_index, label_smoothing = a
    dtype, num_rows, on_cpu = wide_dtype(logits.dtype), len(logits), logits.device.type == "cpu"
    is_labelled, classes = labels != ignore_index, _classes(logits, labels)
    log_p_label = torch.zeros(num_rows, 1, dtype=dtype, device=logits.device)
    log_p_mean, lse = (torch.zeros_like(log_p_label) for _ in range(2))
    widened, result = _buffers(logits, dtype, 2)
    for index in _chunks(logits, _labelled_rows(is_labelled)):
        z = _widen(logits[index], widened)
        log_p = torch.log_softmax(z, 1, out=result[: len(z)])
        log_p_label[index] = log_p.gather(1, classes[index])
        if label_smoothing > 0.0:
            log_p_mean[index] = log_p.mean(1, keepdim=True)
        if not on_cpu:
            lse[index] = z.amax(1, keepdim=True) - log_p.amax(1, keepdim=True)
    if on_cpu:  # without passing over the scores again, but where both are infinite
        z_label = logits.gather(1, classes)
        lse = z_label - log_p_label
        if (z_label == -torch.inf).any():
            infinite = (z_label == -torch.inf).squeeze(1).nonzero().squeeze(1)
            lse[infinite] = torch.logsumexp(logits[infinite].to(dtype), 1, keepdim=True)
    losses = -log_p_label
    if label_smoothing > 0.0:
        losses = (1.0 - label_smoothing) * losses - label_smoothing * log_p_mean
    is_no_class = classes != labels[:, None]
    for t in (losses, lse):
        t.masked_fill_(is_no_class, torch.nan).masked_fill_(~is_labelled[:, None], 0.0)
    return losses.sum() / is_labelled.sum().clamp(min=1), lse.squeeze(1)


def cross_entropy_bwd(a: CrossEntropy, dloss: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """The gradient of logits, new and contiguous, as `reference.cross_entropy`."""
    logits, labels, ignore_index, label_smoothing = a
    is_labelled, classes = labels != ignore_index, _classes(logits, labels)
    rows = _labelled_rows(is_labelled)
    make = torch.empty if rows is None else torch.zeros
    dlogits = make(logits.shape, dtype=logits.dtype, device=logits.device)
    # NaN, as lse, where the label is no class.
    scale = (dloss / is_labelled.sum().clamp(min=1)).masked_fill(classes != labels[:, None], torch.nan)  # [N, 1]
    in_place = logits.dtype == lse.dtype and rows is None
    widened, result = _buffers(logits, lse.dtype, 1 if in_place else 2)
    for index in _chunks(logits, rows):
        z, column = _widen(logits[index], widened), classes[index]
        dz = torch.softmax(z, 1, out=dlogits[index] if in_place else result[: len(z)])
        dz.scatter_(1, column, dz.gather(1, column) - (1.0 - label_smoothing))
        if label_smoothing > 0.0:
            dz.sub_(label_smoothing / logits.shape[1])
        dz.mul_(scale[index])
        if logits.device.type != "cpu":
            dz.masked_fill_(~is_labelled[index][:, None], 0.0)
        if not in_place:
            dlogits[index] = dz if dz.dtype == dlogits.dtype else dz.to(dlogits.dtype)
    return {"logits": dlogits}


def _classes(logits: Tensor, labels: Tensor) -> Tensor:
    """int64 [N, 1]: labels, with a class, whatever it is, in place of those that are none."""
    return labels.clamp(0, logits.shape[1] - 1).long()[:, None]


def _labelled_rows(is_labelled: Tensor) -> Tensor | None:
    """Indices of the rows to treat, None for all."""
    if is_labelled.device.type != "cpu" or bool(is_labelled.all()):
        return None
    return is_labelled.nonzero().squeeze(1)


def _rows_at_once(logits: Tensor) -> int:
    num_scores = _CPU_SCORES * torch.get_num_threads() if logits.device.type == "cpu" else _OTHER_SCORES
    return max(1, min(len(logits), num_scores // logits.shape[1]))


def _buffers(logits: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Two tensors of a chunk in the given dtype, allocated once: fresh memory costs a page fault every 4 KB.

    The first is empty where logits need no widening, the second unless `count` is 2.
    """
    shape = _rows_at_once(logits), logits.shape[1]
    wanted = logits.dtype != dtype, count == 2
    return [torch.empty(shape if want else (0, 0), dtype=dtype, device=logits.device) for want in wanted]


def _widen(z: Tensor, buffer: Tensor) -> Tensor:
    """z itself, or in the dtype of the buffer and there."""
    return z if z.dtype == buffer.dtype else buffer[: len(z)].copy_(z)


def _chunks(logits: Tensor, rows: Tensor | None) -> Iterator[Tensor | slice]:
    """What to index tensors [N, ...] with: the given rows, or all, a few at a time."""
    step = _rows_at_once(logits)
    if rows is not None:
        yield from rows.split(step) if len(rows) else ()
    else:
        for start in range(0, len(logits), step):
            yield slice(start, start + step)
