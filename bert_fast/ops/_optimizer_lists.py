"""What the steps of AdamW and LAMB are given: whether it fits together, and one layout for the tensors of a parameter.

Back-ends see memory, not shapes: what does not fit would be read and written past its end. So every door asks here, of
all its tensors, before anything is written.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.checks import check_dtype
from bert_fast.reference.optimizer import StepLists, is_dense
from bert_fast.reference.precision import wide_dtype

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# From the name of a list and a place in it to what a message calls that tensor.
Naming = Callable[[str, int], str]
_HALF = (torch.float16, torch.bfloat16)
_VIEW_BITS = (Tensor._is_zerotensor, Tensor.is_neg)
_shape, _dtype, _is_cpu = attrgetter("shape"), attrgetter("dtype"), attrgetter("is_cpu")


def _indexed(name: str, i: int) -> str:
    return f"{name}[{i}]"


def as_list(name: str, tensors: Any) -> list[Tensor]:
    """What the argument holds; raises TypeError where that cannot be asked."""
    try:
        each = iter(tensors)
    except TypeError:
        raise TypeError(f"{name}: expected a sequence of Tensors, got {type(tensors).__name__}") from None
    return list(each)


def as_lists(*columns: Any) -> StepLists:
    """The arguments of a step in the order of the record, as lists."""
    return StepLists._make([as_list(name, column) for name, column in zip(StepLists._fields, columns, strict=True)])


def check_hyperparameters(*, lr: Any, betas: Any, eps: Any, weight_decay: Any, max_grad_norm: Any = None) -> None:
    """Raises TypeError or ValueError, naming the argument, unless all are numbers in their ranges.

    The value of an lr that is a tensor is not looked at: that would wait for the device.
    """
    if isinstance(lr, Tensor):
        if lr.layout != torch.strided or lr.is_nested:
            raise ValueError(f"lr: expected a dense Tensor, got layout {lr.layout}{', nested' if lr.is_nested else ''}")
        if lr.numel() != 1 or not lr.is_floating_point():
            raise ValueError(f"lr: expected a number or a floating-point Tensor [], got {lr.dtype} {list(lr.shape)}")
        check_memory("lr", lr)
    else:
        _check_number("lr", lr, 0.0, math.inf)
    for i, beta in enumerate(check_betas(betas)):
        _check_number(f"betas[{i}]", beta, 0.0, 1.0)
    _check_number("eps", eps, 0.0, math.inf)
    _check_number("weight_decay", weight_decay, 0.0, math.inf)
    if max_grad_norm is not None and not (isinstance(max_grad_norm, float) and max_grad_norm == math.inf):
        _check_number("max_grad_norm", max_grad_norm, 0.0, math.inf)
        if max_grad_norm == 0:
            raise ValueError("max_grad_norm: expected a number above 0, or None for no clipping, got 0")


def check_betas(betas: Any) -> tuple[Any, Any]:
    """The two; raises ValueError where it is not two."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers, got {betas!r}")
    return betas[0], betas[1]


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raises unless low <= value < high."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"{name}: expected an int of at most 64 bits or a float, got one of {value.bit_length()} bits")
    if not low <= value < high:
        wanted = f"a number in [{low:g}, {high:g})" if high < math.inf else f"a finite number of at least {low:g}"
        raise ValueError(f"{name}: expected {wanted}, got {value}")


def check_device(name: str, tensor: Tensor, other: Tensor) -> None:
    """Raises ValueError unless both tensors live on one device."""
    if tensor.device != other.device:
        raise ValueError(f"{name}: expected device {other.device} (that of the first tensor), got {tensor.device}")


def check_memory(name: str, tensor: Tensor) -> None:
    """Raises ValueError where a tensor's memory does not hold its values: zeros without memory, negated views."""
    if not torch.compiler.is_compiling() and has_view_bits(tensor):
        raise ValueError(f"{name}: expected memory with its values, got zeros without or a negated view")


def check_lists(lists: StepLists, name: Naming = _indexed) -> None:
    """Raises TypeError or ValueError unless lengths, shapes, dtypes and devices are what `ops.adamw_step` says.

    And unless the memory of each holds its values, which is all that implementations look at.
    """
    if lists_fit(lists):
        return
    params, grads, exp_avgs, exp_avg_sqs, steps, masters = lists
    columns = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "steps": steps}
    if masters:
        columns["master_params"] = masters
    for column, tensors in columns.items():
        if len(tensors) != len(params):
            raise ValueError(f"{column}: expected {len(params)} tensors (as params), got {len(tensors)}")
    if not params:
        return
    first = params[0]
    check_dtype(name("params", 0), first, DTYPES)
    state_dtype = (wide_dtype(first.dtype),)
    check_dtype(name("grads", 0), grads[0], tuple({first.dtype: 1, state_dtype[0]: 1}))
    dtypes = {
        "grads": (grads[0].dtype,),
        "exp_avgs": state_dtype,
        "exp_avg_sqs": state_dtype,
        "steps": (torch.float32,),
        "master_params": state_dtype,
    }
    if masters and first.dtype not in _HALF:
        raise ValueError(f"master_params: expected none, since params are {first.dtype}, got {len(masters)}")
    for i, p in enumerate(params):
        check_dtype(name("params", i), p, (first.dtype,))
        check_device(name("params", i), p, first)
        for column, tensors in columns.items():
            check_dtype(name(column, i), tensors[i], dtypes[column])
            shape = torch.Size() if column == "steps" else p.shape
            if tensors[i].shape != shape:
                raise ValueError(f"{name(column, i)}: expected shape {list(shape)}, got {list(tensors[i].shape)}")
            check_device(name(column, i), tensors[i], first)
            check_memory(name(column, i), tensors[i])
        check_memory(name("params", i), p)


def lists_fit(lists: StepLists) -> bool:
    """Whether `check_lists` is sure to find nothing: its questions, put to whole lists, in a tenth of the time."""
    params, grads, exp_avgs, exp_avg_sqs, steps, masters = lists
    if torch.compiler.is_compiling() or not params or not grads:
        return False
    try:
        dtype, grad_dtype, shapes = params[0].dtype, grads[0].dtype, list(map(_shape, params))
        state_dtype = wide_dtype(dtype)
        alike = [grads, exp_avgs, exp_avg_sqs, *([masters] if masters else [])]
        columns = [params, *alike, steps]
        dtypes = [dtype, grad_dtype, *[state_dtype] * (len(alike) - 1), torch.float32]
        return (
            dtype in (_HALF if masters else DTYPES)
            and grad_dtype in (dtype, state_dtype)
            and all(list(map(_shape, column)) == shapes for column in alike)
            and len(steps) == len(params)
            and not any(map(Tensor.dim, steps))
            and all(set(map(_dtype, column)) == {wanted} for column, wanted in zip(columns, dtypes, strict=True))
            and _are_on(params[0].device, columns)
            and not any(any(map(has_bit, column)) for column in columns for has_bit in _VIEW_BITS)
        )
    except (AttributeError, TypeError):  # not tensors
        return False


def _are_on(device: torch.device, columns: list[list[Tensor]]) -> bool:
    """Whether all tensors live on the device; asked in the quickest way."""
    if device.type == "cpu":
        return all(all(map(_is_cpu, column)) for column in columns)
    if device.index is not None:
        return all(set(map(Tensor.get_device, column)) == {device.index} for column in columns)
    return all(tensor.device == device for column in columns for tensor in column)


def sharing(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Places of two of the tensors, all on one device, that lie in the same memory; None where no two do.

    Only dense tensors are judged; those of classes that hide their memory, and without memory (meta), are not.
    """
    spans = sorted(_spans(tensors))
    for (_, end, i), (start, _, j) in itertools.pairwise(spans):
        if start < end:
            return min(i, j), max(i, j)
    return None


def has_view_bits(tensor: Tensor) -> bool:
    """Whether a tensor's memory does not hold its values: zeros without memory, negated views."""
    return any(has_bit(tensor) for has_bit in _VIEW_BITS)


def _spans(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int, int]]:
    """(address, address behind the end, place) of every tensor that `sharing` judges."""
    for i, t in enumerate(tensors):
        if (
            type(t) in (Tensor, nn.Parameter)
            and t.layout is torch.strided
            and t.numel()
            and not t.is_meta
            and is_dense(t)
        ):
            start = t.data_ptr()
            yield start, start + t.nbytes, i


def with_one_layout(lists: StepLists, name: Naming = _indexed) -> tuple[StepLists, list[tuple[Tensor, Tensor]]]:
    """The lists with contiguous copies where the tensors of a place lie differently in memory; (original, copy) pairs.

    Any dense layout will do if parameter, gradient and state share it. Within a compiled graph the op itself asks.

    Raises: ValueError for tensors that are not strided, and for elements that share memory and are to be written.
    """
    params, grads, exp_avgs, exp_avg_sqs, steps, masters = lists
    columns = [grads, params, exp_avgs, exp_avg_sqs, *([masters] if masters else [])]
    if torch.compiler.is_compiling() or all(all(map(Tensor.is_contiguous, column)) for column in columns):
        return lists, []
    columns = [list(column) for column in columns]
    copies: list[tuple[Tensor, Tensor]] = []
    for i, row in enumerate(zip(*columns, strict=True)):
        for label, t in zip(("grads", "params", "exp_avgs", "exp_avg_sqs", "master_params"), row, strict=False):
            if t.layout != torch.strided:
                raise ValueError(f"{name(label, i)}: expected a dense tensor, got layout {t.layout}")
            if label != "grads" and _overlaps_itself(t):
                raise ValueError(f"{name(label, i)}: expected one place per element, got strides {t.stride()}")
        if all(t.stride() == row[0].stride() for t in row) and is_dense(row[0]):
            continue
        for column in columns:
            column[i] = column[i].clone(memory_format=torch.contiguous_format)
        copies += zip(row[1:], (column[i] for column in columns[1:]), strict=True)
    grads, params, exp_avgs, exp_avg_sqs, *rest = columns
    return StepLists(params, grads, exp_avgs, exp_avg_sqs, steps, rest[0] if rest else []), copies


def _overlaps_itself(t: Tensor) -> bool:
    """Whether elements of t share memory, as those of expanded tensors do."""
    if t.is_contiguous():
        return False
    end = 0  # of what the dimensions with smaller strides reach
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1):
        if stride <= end:
            return True
        end += stride * (size - 1)
    return False
