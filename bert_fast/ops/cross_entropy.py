"""Mean cross entropy over the rows that carry a label, on any back-end.

Registered as `bert_fast::cross_entropy_fwd` and `_bwd`, so `torch.compile` sees two opaque ops and autograd saves the
logits themselves, the labels and one number per row: no fp32 copy, no log-probabilities.
"""

import torch
from torch import Tensor

from bert_fast.backend import requested
from bert_fast.checks import check_dtype, check_integer, check_same_device, check_shape
from bert_fast.env import SETTINGS
from bert_fast.ops._define import define
from bert_fast.reference.cross_entropy import CrossEntropy

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Mean of (1 - s) * (lse(z) - z_label) + s * (lse(z) - mean(z)) over labelled rows z, s the smoothing.

    Args:
        logits (Tensor [N, C], fp32/fp16/bf16/fp64): scores, C >= 1; any strides (a copy is made of columns that do not
            lie side by side).
        labels (Tensor [N], int64 or int32): a class in [0, C), or ignore_index for rows that count for nothing: they
            may hold anything, inf and NaN too.
        ignore_index: the label of rows that count for nothing.
        label_smoothing: s in [0, 1].
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        loss (Tensor [], fp32; fp64 for fp64 logits): 0, with zero gradients, where no row is labelled (torch says NaN).

    Raises:
        TypeError, ValueError: the message names the argument.
        BackendError: the named back-end cannot run the call. A label out of range is a ValueError on the CPU
            (elsewhere with BERT_FAST_DEBUG=1); in compiled graphs and on a GPU, where looking would cost a device sync,
            it makes the loss and the gradient of its row NaN.

    Differentiable once, in logits; their gradient has their dtype. Deterministic: no atomics. No device sync.
    Autocast: logits keep their dtype, all arithmetic inside is fp32 (fp64 for fp64 logits).
    Saves logits, labels and lse (N fp32 numbers). Nothing under `torch.no_grad`.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [9.0, 0.0]])
        >>> round(ops.cross_entropy(logits, torch.tensor([1, -100])).item(), 4)  # the second row is ignored
        0.6931
    """
    check_shape("logits", logits, ("N", "C"))
    if logits.shape[1] == 0:
        raise ValueError("logits: expected at least one column, got shape [N, 0]")
    check_dtype("logits", logits, _DTYPES)
    check_ignore_index(ignore_index)
    check_labels("labels", labels, "logits", logits, logits.shape[1], ignore_index)
    check_label_smoothing(label_smoothing)
    return _op(logits, labels, int(ignore_index), float(label_smoothing), requested(backend))[0]


def check_labels(
    name: str, labels: Tensor, other_name: str, other: Tensor, num_classes: int, ignore_index: int = -100
) -> None:
    """Raises unless labels are one class in [0, num_classes), or ignore_index, per row of `other`, and beside it.

    Values are looked at only where that costs no device sync: on the CPU, elsewhere with BERT_FAST_DEBUG=1; never in a
    compiled graph.

    Raises:
        TypeError: not a Tensor of int64 or int32.
        ValueError: wrong shape or device, or a label out of range.
    """
    num_rows = other.shape[0]
    check_shape(name, labels, (num_rows,))
    check_dtype(name, labels, (torch.int64, torch.int32))
    check_same_device(name, labels, other_name, other)
    if torch.compiler.is_compiling() or (labels.device.type != "cpu" and not SETTINGS.debug) or not num_rows:
        return
    low, high = map(int, labels.aminmax())
    if low >= 0 and high < num_classes:
        return
    used = labels[labels != ignore_index]
    if not used.numel():
        return
    low, high = map(int, used.aminmax())
    if low < 0 or high >= num_classes:
        bad = high if high >= num_classes else low
        raise ValueError(f"{name}: expected {ignore_index} or a class in [0, {num_classes}), got {bad}")


def check_ignore_index(value: int) -> None:
    """Raises TypeError unless it is an int, ValueError where it has more than 64 bits."""
    check_integer("ignore_index", value)


def check_label_smoothing(value: float) -> None:
    """Raises TypeError unless it is a number, ValueError unless 0 <= value <= 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"label_smoothing: expected a number, got {type(value).__name__}")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"label_smoothing: expected a number in [0, 1], got {value}")


_op = define(
    "cross_entropy",
    CrossEntropy,
    outputs={"loss": "s", "lse": "s N"},
    backward="dloss logits labels lse ignore_index label_smoothing",
    gradients="logits",
)
