"""The end of masked-language-model training: mean cross entropy of x W^T + b, x the rows that carry a label.

forward     Z       = x W^T + b                                                [M, V]
            loss    = mean over labelled rows of cross_entropy(Z)              []
gradients   dZ      = softmax(Z) - (1 - s) onehot(labels) - s / V              [M, V], 0 in rows without a label
of the sum  dx      = dZ W                                                     [M, H]
            dweight = dZ^T x                                                   [V, H]
            dbias   = sum over rows of dZ                                      [V]
backward    those, times dloss / number of labelled rows

Forward makes the gradients, of the sum over labelled rows, wherever one is wanted: while the logits are there, so that
nobody keeps them or makes them twice. Backward knows what the sum is to be divided by and multiplied with, and scales.
"""

import torch
from torch import Tensor

from bert_fast.reference.cross_entropy import CrossEntropy, cross_entropy_bwd, cross_entropy_fwd
from bert_fast.reference.precision import wide

__all__ = ["linear_cross_entropy_bwd", "linear_cross_entropy_fwd"]


def linear_cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    wants_dx: bool = False,
    wants_dweight: bool = False,
    wants_dbias: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The mean cross entropy of the rows of x W^T + b, and gradients of its sum.

    x (Tensor [M, H]); weight (Tensor [V, H]); bias (Tensor [V] or None); labels (Tensor [M], int).
    Returns: loss (Tensor [], fp32; fp64 for fp64 inputs); dx [M, H], dweight [V, H], dbias [V], likewise, of the sum of
        the losses of labelled rows; None for what is not wanted.
    """
    x, weight = wide(x), wide(weight)
    logits = x @ weight.T  # wide, and not rounded to the dtype of x in between: nothing keeps them
    if bias is not None:
        logits = logits + wide(bias)
    scores = CrossEntropy(logits, labels, ignore_index, label_smoothing)
    loss, lse = cross_entropy_fwd(scores)
    if not (wants_dx or wants_dweight or wants_dbias):
        return loss, None, None, None
    with torch.no_grad():
        number = (labels != ignore_index).sum().to(loss.dtype)  # the loss is the sum divided by it
        dlogits = cross_entropy_bwd(scores, number, lse)["logits"]
        dx = dlogits @ weight if wants_dx else None
        dweight = dlogits.T @ x if wants_dweight else None
        dbias = dlogits.sum(0) if wants_dbias else None
    return loss, dx, dweight, dbias


def linear_cross_entropy_bwd(
    dloss: Tensor,
    labels: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    x: Tensor,
    weight: Tensor,
    ignore_index: int = -100,
    may_overwrite: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dweight and dbias of `linear_cross_entropy_fwd` for dloss (Tensor []), in the dtypes of x, weight and weight.

    x and weight say the dtypes, nothing else. may_overwrite: the given gradients may be overwritten, and returned where
        they have the dtype already; the reference makes new ones.
    """
    scale = dloss / (labels != ignore_index).sum().clamp(min=1)

    def scaled(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if gradient is None else (gradient * scale).to(dtype)

    return scaled(dx, x.dtype), scaled(dweight, weight.dtype), scaled(dbias, weight.dtype)
