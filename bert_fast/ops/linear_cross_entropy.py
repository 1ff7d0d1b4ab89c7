"""Mean cross entropy of x W^T + b over the rows that carry a label, on any back-end, without the logits of all rows.

Registered as `bert_fast::linear_cross_entropy_fwd` and `_bwd`. Forward makes the gradients too, while a chunk of logits
is there; backward scales them. So forward must know what will be wanted: the public function looks at autograd's state.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.ops._autocast import autocast_linear_operands, without_autocast
from bert_fast.ops._linear_checks import check_input, check_parameters
from bert_fast.ops._register import custom_op, without_none
from bert_fast.ops.cross_entropy import check_ignore_index, check_label_smoothing, check_labels
from bert_fast.reference.precision import wide_dtype

__all__ = ["linear_cross_entropy"]

_OP = "linear_cross_entropy"


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Mean of (1 - s) * (lse(z) - z_label) + s * (lse(z) - mean(z)) over labelled rows z of x W^T + b, s the smoothing.

    x (Tensor [M, H], fp32/fp16/bf16/fp64): any strides. The fewer rows without a label, the less is done in vain: the
        CPU skips them, other devices compute them (looking would cost a device sync), so there they must be finite.
    weight (Tensor [V, H], V >= 1), bias (Tensor [V] or None, dtype of weight): dtype of x or, beside half precision,
        fp32: then cast to the dtype of x within the op, and their gradients are fp32.
    labels (Tensor [M], int64 or int32): a class in [0, V), or ignore_index for rows that count for nothing.
    label_smoothing: s in [0, 1].
    backend: "triton", "torch" or "reference"; None takes the first that can run the call.
    Returns: loss (Tensor [], fp32; fp64 for fp64): 0, with zero gradients, where no row is labelled or M is 0.
    Raises: TypeError, ValueError naming the argument; BackendError if the named back-end cannot run the call. A label
        out of range is a ValueError on the CPU (elsewhere with BERT_FAST_DEBUG=1); in compiled graphs and on a GPU it
        makes the loss and the gradient of its row, and so those of weight and bias, NaN.
    Differentiable once. Deterministic: no atomics. No device sync.
    Autocast: x is cast; fp32 parameters are cast within the op, so that no half-precision copy of them is saved.
    Precision: softmax, losses and the gradients of the sum over rows in fp32 (fp64 for fp64), logits and their gradient
        (at most 1, whatever M is) in the dtype of x, chunk by chunk; divided by the number of rows at the very end.
    Saves x, labels, weight and the gradients that are wanted (M H + V H + V numbers, fp32); under `torch.no_grad`, and
        where nothing requires a gradient, none are made. In eager mode
        backward scales them in place where the graph is not kept.
    """
    x, weight, bias = autocast_linear_operands(x, weight, bias)
    check_input("x", x)
    check_parameters("weight", weight, "bias", bias, x.shape[1], x, "V")
    if weight.shape[0] == 0:
        raise ValueError("weight: expected at least one row, got shape [0, H]")
    check_ignore_index(ignore_index)
    check_labels("labels", labels, "x", x, weight.shape[0], ignore_index)
    check_label_smoothing(label_smoothing)
    grad = torch.is_grad_enabled()
    wants = [grad and t is not None and t.requires_grad for t in (x, weight, bias)]
    ignore_index, smoothing, backend = int(ignore_index), float(label_smoothing), requested(backend)
    if any(wants) and _is_eager(x, weight, bias):
        return _Eager.apply(x, weight, bias, labels, ignore_index, smoothing, backend)
    return _forward(x, weight, bias, labels, ignore_index, smoothing, *wants, backend)[0]


@custom_op("linear_cross_entropy_fwd", tensors={"x": "x M H", "weight": "p V+ H", "bias": "p V", "labels": "int M"})
@without_autocast
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, label_smoothing: float,
    wants_dx: bool, wants_dweight: bool, wants_dbias: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    loss, *gradients = resolve(_OP, OpSpec.of(x), backend).linear_cross_entropy_fwd(
        x, weight, bias, labels, ignore_index, label_smoothing, wants_dx, wants_dweight, wants_dbias
    )
    return loss, *without_none(tuple(gradients), loss)


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, label_smoothing: float,
    wants_dx: bool, wants_dweight: bool, wants_dbias: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    loss = x.new_empty((), dtype=wide_dtype(x.dtype))
    dx = loss.new_empty(x.shape) if wants_dx else None
    dweight = loss.new_empty(weight.shape) if wants_dweight else None
    dbias = loss.new_empty(weight.shape[0]) if wants_dbias else None
    return loss, *without_none((dx, dweight, dbias), loss)


@custom_op(
    "linear_cross_entropy_bwd",
    tensors={
        "x": "x M H", "weight": "p V+ H", "dloss": "s", "labels": "int M", "dx": "s M H", "dweight": "s V H",
        "dbias": "s V",
    },
)  # fmt: skip
@without_autocast
def _backward(
    dloss: Tensor, labels: Tensor, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, x: Tensor,
    weight: Tensor, ignore_index: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    implementation = resolve(_OP, OpSpec.of(x), backend)
    gradients = implementation.linear_cross_entropy_bwd(dloss, labels, dx, dweight, dbias, x, weight, ignore_index)
    return without_none(gradients, dloss)


@_backward.register_fake
def _(
    dloss: Tensor, labels: Tensor, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, x: Tensor,
    weight: Tensor, ignore_index: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    like = (dx, x), (dweight, weight), (dbias, weight)
    return without_none(tuple(None if t is None else p.new_empty(t.shape) for t, p in like), dloss)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, labels, ctx.ignore_index, _, *wants, ctx.backend = inputs
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)
    made = (gradient if wanted else None for gradient, wanted in zip(gradients, wants, strict=True))
    ctx.save_for_backward(labels, *made, x, weight)


def _autograd(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 10
    saved = ctx.saved_tensors
    gradients = _backward(dloss, *saved, ctx.ignore_index, ctx.backend)
    return *_wanted(gradients, saved), *(None,) * 7


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _wanted(gradients: Any, saved: Any) -> Iterator[Tensor | None]:
    """dx, dweight, dbias; None for those of which nothing was saved."""
    return (made if kept is not None else None for made, kept in zip(gradients, saved[1:4], strict=True))


class _Eager(torch.autograd.Function):
    """What `_forward` and its formula compute, but nobody else holds the gradients that forward made.

    So backward may scale them in place: no second tensor of the size of weight, which on the CPU is fresh pages too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int,
                label_smoothing: float, backend: str) -> Tensor:  # fmt: skip
        loss, *gradients = without_autocast(resolve(_OP, OpSpec.of(x), backend).linear_cross_entropy_fwd)(
            x, weight, bias, labels, ignore_index, label_smoothing, *ctx.needs_input_grad[:3]
        )
        ctx.ignore_index, ctx.backend = ignore_index, backend
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(labels, *gradients, x, weight)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None) -> Any:
        if dloss is None:
            return (None,) * 7
        saved = ctx.saved_tensors
        if _is_last_use():
            implementation = resolve(_OP, OpSpec.of(saved[4]), ctx.backend)
            gradients = without_autocast(implementation.linear_cross_entropy_bwd)(dloss, *saved, ctx.ignore_index, True)
        else:
            gradients = _backward(dloss, *saved, ctx.ignore_index, ctx.backend)
        return *_wanted(gradients, saved), *(None,) * 4


def _is_eager(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors, and nobody traces what happens to them or follows tangents."""
    are_plain = all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors if t is not None)
    return are_plain and not torch.compiler.is_compiling() and forward_ad._current_level < 0


def _is_last_use() -> bool:
    """Of what was saved, in a running backward: it neither is to be differentiated itself nor keeps the graph."""
    # Private to PyTorch, made for memory that compiled graphs donate. Without it every graph counts as kept.
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return not torch.is_grad_enabled() and not keeps_graph()
