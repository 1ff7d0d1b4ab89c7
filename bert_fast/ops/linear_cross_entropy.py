"""Mean cross entropy of x W^T + b over the rows that carry a label, on any back-end, without the logits of all rows.

Registered as `bert_fast::linear_cross_entropy_fwd` and `_bwd`. Forward makes the gradients too, while a chunk of logits
is there; backward scales them. So forward must know what will be wanted: the public function looks at autograd's state.
"""

import itertools
from collections.abc import Mapping, Set
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.checks import check_dtype, check_same_device, check_shape
from bert_fast.ops._autocast import autocast_linear_operands, without_autocast
from bert_fast.ops._define import declaration
from bert_fast.ops._linear_checks import check_input, check_parameters
from bert_fast.ops._memory import name_call
from bert_fast.ops._register import Op, are_plain
from bert_fast.ops._saved import keep_tensors, kept_tensors
from bert_fast.ops._signature import lines_of
from bert_fast.ops.cross_entropy import check_ignore_index, check_label_smoothing, check_labels
from bert_fast.reference.linear_cross_entropy import LinearCrossEntropy
from bert_fast.reference.precision import wide_dtype


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    row_groups: Tensor | None = None,
    class_groups: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Mean of (1 - s) * (lse(z) - z_label) + s * (lse(z) - mean(z)) over labelled rows z of x W^T + b, s the smoothing.

    Args:
        x (Tensor [M, H], fp32/fp16/bf16/fp64): any strides. The fewer rows without a label, the less is done in vain:
            the CPU skips them, other devices compute them (looking would cost a device sync), so there they must be
            finite.
        weight (Tensor [V, H], V >= 1): dtype of x or, beside half precision, fp32: then cast to the dtype of x within
            the op, and their gradients are fp32.
        bias (Tensor [V] or None, dtype of weight): added to the scores.
        labels (Tensor [M], int64 or int32): a class in [0, V), or ignore_index for rows that count for nothing.
        ignore_index: the label of rows that count for nothing.
        label_smoothing: s in [0, 1].
        row_groups (Tensor [M], int64 or int32): with class_groups, or neither. A class of a row's group is left out of
            that row's softmax, unless it is the row's label: of embeddings, where weight holds the batch's other texts,
            a duplicate is no negative. Not with label smoothing.
        class_groups (Tensor [V], int64 or int32): the group of each class.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        loss (Tensor [], fp32; fp64 for fp64): 0, with zero gradients, where no row is labelled or M is 0.

    Raises:
        TypeError, ValueError: the message names the argument.
        BackendError: the named back-end cannot run the call. A label out of range is a ValueError on the CPU
            (elsewhere with BERT_FAST_DEBUG=1); in compiled graphs and on a GPU it makes the loss and the gradient of
            its row, and so those of weight and bias, NaN.

    Differentiable once. Deterministic: no atomics. No device sync.
    Autocast: x is cast; fp32 parameters are cast within the op, so that no half-precision copy of them is saved.

    Precision:
        softmax, losses and the gradients of the sum over rows in fp32 (fp64 for fp64), logits and their gradient (at
        most 1, whatever M is) in the dtype of x, chunk by chunk; divided by the number of rows at the very end.

    Saves x, labels, weight and the gradients that are wanted (M H + V H + V numbers, fp32); under `torch.no_grad`, and
        where nothing requires a gradient, none are made. In eager mode
        backward scales them in place where the graph is not kept.

    Example:
        >>> x, weight, labels = torch.randn(4, 8), torch.randn(10, 8), torch.tensor([1, 2, -100, 3])
        >>> loss = ops.linear_cross_entropy(x, weight, None, labels)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(x @ weight.T, labels), atol=1e-4)
        True
    """
    x, weight, bias = autocast_linear_operands(x, weight, bias)
    check_input("x", x)
    check_parameters("weight", weight, "bias", bias, x.shape[1], x, "V")
    if weight.shape[0] == 0:
        raise ValueError("weight: expected at least one row, got shape [0, H]")
    check_ignore_index(ignore_index)
    check_labels("labels", labels, "x", x, weight.shape[0], ignore_index)
    check_label_smoothing(label_smoothing)
    if row_groups is not None or class_groups is not None:
        _check_groups(row_groups, class_groups, x, weight, label_smoothing)
    grad = torch.is_grad_enabled()
    wants = [grad and t is not None and t.requires_grad for t in (x, weight, bias)]
    ignore_index, smoothing, backend = int(ignore_index), float(label_smoothing), requested(backend)
    if any(wants) and _is_eager(x, weight, bias):
        return _Eager.apply(x, weight, bias, labels, ignore_index, smoothing, row_groups, class_groups, backend)
    return _op(x, weight, bias, labels, ignore_index, smoothing, row_groups, class_groups, *wants, backend)[0]


def _check_groups(
    row_groups: Tensor | None, class_groups: Tensor | None, x: Tensor, weight: Tensor, label_smoothing: float
) -> None:
    given = {"row_groups": row_groups, "class_groups": class_groups}
    for (name, groups), (of, like) in zip(given.items(), (("x", x), ("weight", weight)), strict=True):
        if groups is None:
            raise ValueError(f"{name}: expected a tensor beside the other groups, got None")
        check_dtype(name, groups, (torch.int64, torch.int32))
        check_shape(name, groups, (like.shape[0],))
        check_same_device(name, groups, of, like)
    if label_smoothing > 0.0:
        raise ValueError(f"label_smoothing: expected 0 with row_groups, which leave classes out, got {label_smoothing}")


# Not by `_define.define`: forward makes the gradients, and backward scales what forward made.
_GRADIENTS = ("x", "weight", "bias")
_TYPES, _LINES = get_type_hints(LinearCrossEntropy), lines_of(LinearCrossEntropy)


def _read_forward(given: tuple[Any, ...]) -> tuple[LinearCrossEntropy, frozenset[str]]:
    """The record, and which gradients are wanted."""
    return LinearCrossEntropy._make(given[:8]), frozenset(itertools.compress(_GRADIENTS, given[8:11]))


def _read_backward(given: tuple[Any, ...]) -> tuple[LinearCrossEntropy, Tensor, dict[str, Tensor]]:
    """The record as far as it is given, dloss, and gradients of the sum."""
    dloss, labels, *sums, x, weight, ignore_index = given
    made = {name: t for name, t in zip(_GRADIENTS, sums, strict=True) if t is not None}
    return LinearCrossEntropy(x, weight, None, labels, ignore_index, 0.0), dloss, made


def _in_order(made: Mapping[str, Tensor], like: Tensor) -> tuple[Tensor, ...]:
    """The gradients as an op returns them: an empty one in the place of each that is not made."""
    return tuple([made[name] if name in made else like.new_empty(0) for name in _GRADIENTS])


@without_autocast
def _make(_: Tensor, a: LinearCrossEntropy, wants: Set[str], backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    module: Any = resolve("linear_cross_entropy", OpSpec(a.x.device, a.x.dtype), backend)
    try:
        return module.linear_cross_entropy_fwd(a, wants)
    except torch.OutOfMemoryError as error:
        name_call(error, "linear_cross_entropy_fwd", a)
        raise


@without_autocast
def _scale(dloss: Tensor, a: LinearCrossEntropy, sums: Mapping[str, Tensor], backend: str, may_overwrite: bool) -> Any:
    module: Any = resolve("linear_cross_entropy", OpSpec(a.x.device, a.x.dtype), backend)
    try:
        return module.linear_cross_entropy_bwd(a, dloss, sums, may_overwrite)
    except torch.OutOfMemoryError as error:
        name_call(error, "linear_cross_entropy_bwd", a)
        raise


def _forward(*given: Any) -> tuple[Tensor, ...]:
    a, wants = _read_forward(given[:-1])
    loss, made = _make(a.x, a, wants, given[-1])
    return loss, *_in_order(made, loss)


def _fake_forward(*given: Any) -> tuple[Tensor, ...]:
    a, wants = _read_forward(given[:-1])
    loss = a.x.new_empty((), dtype=wide_dtype(a.x.dtype))
    given_fields = {name: getattr(a, name) for name in _GRADIENTS if name in wants}
    return loss, *_in_order({n: loss.new_empty(t.shape) for n, t in given_fields.items() if t is not None}, loss)


def _backward(*given: Any) -> tuple[Tensor, ...]:
    a, dloss, sums = _read_backward(given[:-1])
    return _in_order(_scale(dloss, a, sums, given[-1], False), dloss)


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    a, dloss, sums = _read_backward(given[:-1])
    made = {name: (a.x if name == "x" else a.weight).new_empty(t.shape) for name, t in sums.items()}
    return _in_order(made, dloss)


_op = Op(
    "linear_cross_entropy_fwd", _forward, _LINES, None, None,
    declaration=declaration(
        _TYPES | {"wants_dx": bool, "wants_dweight": bool, "wants_dbias": bool, "backend": str}, 4
    ),
)  # fmt: skip
_backward_op = Op(
    "linear_cross_entropy_bwd",
    _backward,
    _LINES | {"dloss": "s", "dx": "s M H", "dweight": "s V H", "dbias": "s V"},
    None,
    None,
    declaration=declaration(
        {"dloss": Tensor, "labels": Tensor}
        | dict.fromkeys(("dx", "dweight", "dbias"), Tensor | None)
        | {"x": Tensor, "weight": Tensor, "ignore_index": int, "backend": str},
        3,
    ),
)


_KEPT = ("labels", "dx", "dweight", "dbias", "x", "weight")


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    a, wants = _read_forward(inputs[:-1])
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)
    made = (gradient if name in wants else None for name, gradient in zip(_GRADIENTS, gradients, strict=True))
    keep_tensors(ctx, (a.labels, *made, a.x, a.weight))
    ctx.others = (a.ignore_index, inputs[-1])


def _differentiate(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 12
    saved = kept_tensors(ctx, _KEPT)
    made = _backward_op(dloss, *saved, *ctx.others)
    gradients = (t if kept is not None else None for t, kept in zip(made, saved[1:4], strict=True))
    return *gradients, *(None,) * 9


_op.register_fake(_fake_forward)
_backward_op.register_fake(_fake_backward)
_op.register_autograd(_differentiate, setup_context=_save)


class _Eager(torch.autograd.Function):
    """What the op and its formula compute, but nothing else holds the gradients that forward made.

    So backward may scale them in place: no second tensor of the size of weight, which on the CPU is fresh pages too.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """given: the record's fields and the request for a back-end."""
        a = LinearCrossEntropy._make(given[:-1])
        wants = frozenset(itertools.compress(_GRADIENTS, ctx.needs_input_grad))
        loss, made = _make(a.x, a, wants, given[-1])
        ctx.others = (a.ignore_index, given[-1])
        ctx.set_materialize_grads(False)
        keep_tensors(ctx, (a.labels, *map(made.get, _GRADIENTS), a.x, a.weight))
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None) -> Any:
        if dloss is None or not _is_last_use():
            return _differentiate(ctx, dloss)[:9]
        ignore_index, backend = ctx.others
        a, _, sums = _read_backward((dloss, *kept_tensors(ctx, _KEPT), ignore_index))
        made = _scale(dloss, a, sums, backend, True)
        return *map(made.get, _GRADIENTS), *(None,) * 6


def _is_eager(*tensors: Tensor | None) -> bool:
    """Whether these are memory as it is, and nothing traces what happens to them or follows tangents."""
    return not torch.compiler.is_compiling() and forward_ad._current_level < 0 and are_plain(tensors)


def _is_last_use() -> bool:
    """Of what was saved, in a running backward: it neither is to be differentiated itself nor keeps the graph."""
    # Private to PyTorch, made for memory that compiled graphs donate. Without it every graph counts as kept.
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return not torch.is_grad_enabled() and not keeps_graph()
