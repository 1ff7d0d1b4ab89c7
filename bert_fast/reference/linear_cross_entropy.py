"""The end of masked-language-model training: mean cross entropy of x W^T + b, x the rows that carry a label.

forward     Z       = x W^T + b, -inf where a class is left out of a row       [M, V]
            loss    = mean over labelled rows of cross_entropy(Z)              []
gradients   dZ      = softmax(Z) - (1 - s) onehot(labels) - s / V              [M, V], 0 in rows without a label
of the sum  dx      = dZ W                                                     [M, H]
            dweight = dZ^T x                                                   [V, H]
            dbias   = sum over rows of dZ                                      [V]
backward    those, times dloss / number of labelled rows

A row leaves out the classes of its own group, but for its label. In training of embeddings, where the classes are the
batch's other texts, these are the ones that are no negatives of it: a duplicate, another text of the same question.

Forward makes the gradients, of the sum over labelled rows, wherever one is wanted: while the logits are there, so that
nobody keeps them or makes them twice. Backward knows what the sum is to be divided by and multiplied with, and scales.
"""

from collections.abc import Mapping, Set
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.cross_entropy import CrossEntropy, cross_entropy_bwd, cross_entropy_fwd
from bert_fast.reference.precision import wide

GRADIENTS = frozenset({"x", "weight", "bias"})


class LinearCrossEntropy(NamedTuple):
    """The arguments; parameters of the dtype of x or, beside half precision, fp32."""

    x: Annotated[Tensor, "x M H"]
    weight: Annotated[Tensor, "p V+ H"]
    bias: Annotated[Tensor | None, "p V"]
    labels: Annotated[Tensor, "int M"]
    ignore_index: int  # rows of this label count for nothing
    label_smoothing: float  # s
    row_groups: Annotated[Tensor | None, "int M"] = None
    class_groups: Annotated[Tensor | None, "int V"] = None  # both or neither, and then s is 0


def linear_cross_entropy_fwd(a: LinearCrossEntropy, wants: Set[str] = GRADIENTS) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean cross entropy of the rows of x W^T + b, and the wanted gradients of its sum, by name.

    Returns: loss (Tensor [], fp32; fp64 for fp64 inputs); x [M, H], weight [V, H], bias [V], likewise, of the sum of
        the losses of labelled rows; without a bias none of it.
    """
    x, weight = wide(a.x), wide(a.weight)
    logits = x @ weight.T  # wide, and not rounded to the dtype of x in between: nothing keeps them
    if a.bias is not None:
        logits = logits + wide(a.bias)
    if a.row_groups is not None and a.class_groups is not None:
        others = torch.arange(len(weight), device=x.device) != a.labels[:, None]
        logits = logits.masked_fill((a.row_groups[:, None] == a.class_groups) & others, -torch.inf)
    scores = CrossEntropy(logits, a.labels, a.ignore_index, a.label_smoothing)
    loss, lse = cross_entropy_fwd(scores)
    made: dict[str, Tensor] = {}
    if not wants:
        return loss, made
    with torch.no_grad():
        number = (a.labels != a.ignore_index).sum().to(loss.dtype)  # the loss is the sum divided by it
        dlogits = cross_entropy_bwd(scores, number, lse)["logits"]
        if "x" in wants:
            made["x"] = dlogits @ weight
        if "weight" in wants:
            made["weight"] = dlogits.T @ x
        if "bias" in wants and a.bias is not None:
            made["bias"] = dlogits.sum(0)
    return loss, made


def linear_cross_entropy_bwd(
    a: LinearCrossEntropy, dloss: Tensor, sums: Mapping[str, Tensor], may_overwrite: bool = False
) -> dict[str, Tensor]:
    """Gradients by name out of those that forward made, for dloss (Tensor []), in the dtypes of x, weight and weight.

    x and weight say the dtypes, nothing else; bias and label_smoothing are not read, may be None. may_overwrite: `sums`
        may be overwritten, and returned where they have the dtype already; the reference makes new ones.
    """
    scale = dloss / (a.labels != a.ignore_index).sum().clamp(min=1)
    return {name: (t * scale).to(a.x.dtype if name == "x" else a.weight.dtype) for name, t in sums.items()}
