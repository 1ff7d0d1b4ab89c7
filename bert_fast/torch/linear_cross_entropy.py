"""Mean cross entropy of x W^T + b from library products, a few rows at a time: the logits of all rows never exist.

A chunk of rows goes all the way: logits, losses, softmax, its gradient in the same memory, and the two products that
take it to x and weight. On the CPU only rows with a label are treated; elsewhere picking them out would cost a device
sync, so all are, and those without a label leave zeros behind.

On the CPU chunks are small: memory below 32 MB comes back from where malloc keeps it, larger pieces are fresh pages
each time, and those cost as much as a quarter of the product that fills them. For the same reason the gradient of
weight is added up in pieces of a few thousand words, whose products are small too.
"""

from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor

from bert_fast.reference.linear_cross_entropy import GRADIENTS, LinearCrossEntropy
from bert_fast.reference.precision import wide_dtype
from bert_fast.torch._gemm import matmul, weight_gradient

# Of the logits of a chunk. CPU: just below 2^25, where glibc's malloc stops keeping memory (274 rows of 30,522 in fp32;
# chunks of 128 and of 614 rows are 3 to 6 % slower). Elsewhere products need more rows to be fast.
_CPU_CHUNK_BYTES, _OTHER_CHUNK_BYTES = 2**25 - 2**12, 2**27
# Words whose weight gradient is added up at a time: 12 MB of fp32 at H = 768.
_WORDS = 4096
# Logits that softmax treats at once, on the CPU by each thread: 1 MB of fp32 stays in a core's second cache.
_CPU_SCORES, _OTHER_SCORES = 2**18, 2**24


def linear_cross_entropy_fwd(a: LinearCrossEntropy, wants: Set[str] = GRADIENTS) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss [], gradients of the sum by name), as `reference.linear_cross_entropy`.

    A label that is neither a class nor ignore_index makes the loss and the gradient of its row NaN.
    """
    x, weight, bias, labels, ignore_index, label_smoothing, row_groups, class_groups = a
    dtype, made = wide_dtype(x.dtype), dict[str, Tensor]()
    is_labelled = labels != ignore_index
    total = torch.zeros((), dtype=dtype, device=x.device)
    if "x" in wants:
        made["x"] = torch.zeros(x.shape, dtype=dtype, device=x.device)
    if "weight" in wants:
        made["weight"] = torch.empty(weight.shape, dtype=dtype, device=x.device)
    if "bias" in wants and bias is not None:
        made["bias"] = torch.zeros(len(weight), dtype=dtype, device=x.device)
    narrow_weight, narrow_bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    is_first = True
    for index in _chunks(x, is_labelled, len(weight)):
        rows = x[index]
        logits = matmul(rows, narrow_weight.t(), narrow_bias)
        if row_groups is not None and class_groups is not None:
            _leave_out(logits, labels[index], row_groups[index], class_groups)
        total += _losses(logits, labels[index], is_labelled[index], label_smoothing, bool(made)).sum()
        if "x" in made:
            made["x"][index] = matmul(logits, narrow_weight).to(dtype)
        if "weight" in made:
            _add_weight_gradient(made["weight"], logits, rows, is_first)
        if "bias" in made:
            made["bias"] += logits.sum(0, dtype=dtype)
        is_first = False
    if "weight" in made and is_first:
        made["weight"].zero_()
    return total / is_labelled.sum().clamp(min=1), made


def linear_cross_entropy_bwd(
    a: LinearCrossEntropy, dloss: Tensor, sums: Mapping[str, Tensor], may_overwrite: bool = False
) -> dict[str, Tensor]:
    """Gradients by name, as `reference.linear_cross_entropy`.

    may_overwrite: scaled in place, which spares fresh memory of the size of weight.
    """
    scale = dloss / (a.labels != a.ignore_index).sum().clamp(min=1)
    return {
        name: (t.mul_(scale) if may_overwrite else t * scale).to(a.x.dtype if name == "x" else a.weight.dtype)
        for name, t in sums.items()
    }


def _leave_out(logits: Tensor, labels: Tensor, row_groups: Tensor, class_groups: Tensor) -> None:
    """Logits [n, V] of -inf where row and class are of one group, but for the label's."""
    columns = labels.clamp(0, logits.shape[1] - 1).long()[:, None]
    of_labels = logits.gather(1, columns)
    logits.masked_fill_(row_groups[:, None] == class_groups, -torch.inf).scatter_(1, columns, of_labels)


def _losses(logits: Tensor, labels: Tensor, is_labelled: Tensor, smoothing: float, wants_gradient: bool) -> Tensor:
    """Losses [n, 1] of logits [n, V], which, if it is wanted, their gradient overwrites.

    With m = max(z) and p = softmax(z), -log max(p) is log sum exp(z - m): no pass of logarithms is needed.
    """
    dtype, on_cpu, num_words = wide_dtype(logits.dtype), logits.device.type == "cpu", logits.shape[1]
    columns = labels.clamp(0, num_words - 1).long()[:, None]
    is_no_class = columns != labels[:, None]
    at_once = max(1, (_CPU_SCORES * torch.get_num_threads() if on_cpu else _OTHER_SCORES) // num_words)
    losses = torch.empty(len(logits), 1, dtype=dtype, device=logits.device)
    buffer = torch.empty(min(at_once, len(logits)), num_words, dtype=dtype, device=logits.device)
    for z, column, loss in zip(logits.split(at_once), columns.split(at_once), losses.split(at_once), strict=True):
        p = buffer[: len(z)]
        highest = z.amax(1, keepdim=True).to(dtype)
        torch.mul(highest - z.gather(1, column), 1.0 - smoothing, out=loss)
        if smoothing > 0.0:
            loss.sub_(torch.sub(z, highest, out=p).mean(1, keepdim=True), alpha=smoothing)
        torch.softmax(z, 1, dtype=dtype, out=p)
        loss.sub_(p.amax(1, keepdim=True).log_())
        if wants_gradient:
            p.scatter_(1, column, p.gather(1, column) - (1.0 - smoothing))
            z.copy_(p.sub_(smoothing / num_words) if smoothing > 0.0 else p)
    # Rows on the CPU all have a label; and there it costs nothing to see that all labels are classes.
    if not on_cpu or bool(is_no_class.any()):
        is_ignored = ~is_labelled[:, None]
        for t in (losses, logits) if wants_gradient else (losses,):
            t.masked_fill_(is_no_class, torch.nan).masked_fill_(is_ignored, 0.0)
    return losses


def _add_weight_gradient(dweight: Tensor, dlogits: Tensor, x: Tensor, is_first: bool) -> None:
    """dweight [V, H] (fp32, or fp64) += dlogits [n, V]^T x [n, H]; what it holds before the first is not looked at."""
    for words, dz in zip(dweight.split(_WORDS), dlogits.split(_WORDS, dim=1), strict=True):
        product = weight_gradient(dz, x, words.dtype)
        words.copy_(product) if is_first else words.add_(product)


def _chunks(x: Tensor, is_labelled: Tensor, num_words: int) -> Iterator[Tensor | slice]:
    """What to index rows with, a few at a time and about as many each time."""
    on_cpu = x.device.type == "cpu"
    rows = is_labelled.nonzero().squeeze(1) if on_cpu and not bool(is_labelled.all()) else None
    num_rows = len(x) if rows is None else len(rows)
    most = max(1, (_CPU_CHUNK_BYTES if on_cpu else _OTHER_CHUNK_BYTES) // (num_words * x.element_size()))
    num_chunks = -(-num_rows // most)
    step = -(-num_rows // max(1, num_chunks))
    for start in range(0, num_rows, max(1, step)):
        part = slice(start, start + step)
        yield part if rows is None else rows[part]
