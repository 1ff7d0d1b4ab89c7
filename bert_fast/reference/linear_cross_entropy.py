"""The end of masked-language-model training: cross entropy of x W^T + b, x the rows that carry a label.

The composition of linear_gelu.py's linear layer and cross_entropy.py. Back-ends make the logits chunk by chunk and keep
none of them; here they are simply made twice. Saved for backward: x and lse.
"""

from torch import Tensor

from bert_fast.reference.cross_entropy import cross_entropy_bwd, cross_entropy_fwd
from bert_fast.reference.linear import linear_bwd, linear_fwd
from bert_fast.reference.precision import wide

__all__ = ["linear_cross_entropy_bwd", "linear_cross_entropy_fwd"]


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Wide, and not rounded to the dtype of x in between: nothing keeps them."""
    return linear_fwd(wide(x), wide(weight), None if bias is None else wide(bias))


def linear_cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The mean cross entropy of the rows of x W^T + b.

    x (Tensor [N, H]); weight (Tensor [V, H]); bias (Tensor [V] or None); labels (Tensor [N], int).
    Returns: loss (Tensor [], fp32; fp64 for fp64 inputs); lse (Tensor [N], likewise).
    """
    return cross_entropy_fwd(_logits(x, weight, bias), labels, ignore_index, label_smoothing)


def linear_cross_entropy_bwd(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [N, H], dweight [V, H], dbias [V], in the dtypes of x and weight; drop dbias where there was no bias."""
    logits = _logits(x, weight, bias)
    dlogits = cross_entropy_bwd(dloss, logits, labels, lse, ignore_index, label_smoothing)
    dx, dweight, dbias = linear_bwd(dlogits, wide(x), wide(weight))
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)
