"""Cross entropy of class scores, averaged over the rows that carry a label.

For a row z [C] with label c, smoothing s, and lse = log sum exp(z):

    loss_row = (1 - s) * (lse - z_c) + s * (lse - mean(z))
    loss     = sum of loss_row over labelled rows / number of labelled rows
    dz       = dloss / number * (softmax(z) - (1 - s) * onehot(c) - s / C),     0 for rows without a label

Saved for backward: logits and lse. Rows labelled `ignore_index` count for nothing; where no row is left, loss and
gradient are 0 (torch says NaN, which would end a training run over one batch without a masked word).
Source of smoothing: Szegedy et al. 2016 (arXiv:1512.00567), section 7. Precision: fp32 (fp64 for fp64 logits), the
loss too.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.precision import wide


class CrossEntropy(NamedTuple):
    """The arguments; a label is a class, or ignore_index: any other makes the loss and the gradient of its row NaN."""

    logits: Annotated[Tensor, "x N C+"]
    labels: Annotated[Tensor, "int N"]
    ignore_index: int = -100
    label_smoothing: float = 0.0


def _labelled(z: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every row: a class, that of its label if it is one; whether it counts; 1, or NaN where its label is no class.

    Last the number of rows that count, at least 1, so that 0 / it is 0.
    """
    valid = labels != ignore_index
    classes = labels.clamp(0, z.shape[1] - 1)
    factor = torch.ones_like(z[:, 0]).masked_fill((classes != labels) & valid, torch.nan)
    return classes.long(), valid, factor, valid.sum().clamp(min=1)


def cross_entropy_fwd(a: CrossEntropy) -> tuple[Tensor, Tensor]:
    """loss (Tensor [], fp32; fp64 for fp64 logits), the mean over labelled rows; lse (Tensor [N], likewise)."""
    z = wide(a.logits)
    classes, valid, factor, number = _labelled(z, a.labels, a.ignore_index)
    lse = torch.logsumexp(z, dim=1)
    rows = lse - (1.0 - a.label_smoothing) * z.gather(1, classes[:, None]).squeeze(1)
    if a.label_smoothing > 0.0:
        rows = rows - a.label_smoothing * z.mean(dim=1)
    return torch.where(valid, rows * factor, 0.0).sum() / number, lse


def cross_entropy_bwd(a: CrossEntropy, dloss: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """The gradient by name, of logits (Tensor [N, C], their dtype), for dloss (Tensor []); lse as from the forward."""
    z = wide(a.logits)
    classes, valid, factor, number = _labelled(z, a.labels, a.ignore_index)
    onehot = torch.zeros_like(z).scatter_(1, classes[:, None], 1.0)
    # A score of inf makes every probability of its row NaN, as in softmax.
    p = torch.exp(z - lse[:, None]).masked_fill(lse[:, None] == torch.inf, torch.nan)
    dz = p - (1.0 - a.label_smoothing) * onehot - a.label_smoothing / z.shape[1]
    dlogits = torch.where(valid[:, None], dz * factor[:, None], 0.0) * (dloss / number)
    return {"logits": dlogits.to(a.logits.dtype)}
