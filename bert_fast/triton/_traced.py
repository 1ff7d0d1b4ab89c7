"""Tensors that are not there, on which a composite of kernels runs while its program is made (`_tracing.py`).

A tensor has a dtype, a device, sizes (some of them numbers of the call, `_sizes.py`) and strides; it is a slot of the
program, or a part of one. Views are made here; what asks the device for something is noted by the trace.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bert_fast.triton._sizes import Size

NO_NAMES: Mapping[str, Any] = MappingProxyType({})
Number = int | Size
Shape = tuple[Any, ...]
_FAR = 1 << 44  # bytes between the imagined addresses of two slots: more than any tensor has


class Untraceable(Exception):
    """There is no program for such a call."""


class Traced:
    """A tensor while a program is made. offset: bytes from the beginning of its slot, whose dtype it has."""

    def __init__(
        self, trace: Any, slot: int, shape: Shape, strides: Shape, dtype: torch.dtype, offset: Number = 0
    ) -> None:
        self.trace, self.slot, self.shape, self.strides, self.dtype, self.offset = (
            trace, slot, shape, strides, dtype, offset,
        )  # fmt: skip

    is_cuda = property(lambda self: self.trace.device.type == "cuda")
    is_cpu = property(lambda self: self.trace.device.type == "cpu")
    device = property(lambda self: self.trace.device)
    ndim = property(lambda self: len(self.shape))
    requires_grad = False

    def get_device(self) -> int:
        return self.trace.device_index

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def numel(self) -> Number:
        return _product(self.shape)

    def data_ptr(self) -> Any:
        """An address that only this place has, aligned as the place is."""
        return (self.slot + 1) * _FAR + self.trace.skews.get(self.slot, 0) + self.offset

    def is_contiguous(self) -> bool:
        return all(
            (type(stride) is type(wanted) and stride == wanted) or size == 1
            for size, stride, wanted in zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        )

    def contiguous(self) -> "Traced":
        if self.is_contiguous():
            return self
        return self.trace.call(Tensor.contiguous, [self], self.shape, self.dtype)

    def _view(self, shape: Shape, strides: Shape, offset: Number = 0) -> "Traced":
        more = offset * self.dtype.itemsize
        return Traced(self.trace, self.slot, shape, strides, self.dtype, self.offset + more)

    def t(self) -> "Traced":
        (rows, cols), (row_stride, col_stride) = self.shape, self.strides
        return self._view((cols, rows), (col_stride, row_stride))

    def view(self, *shape: Any) -> "Traced":
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        if not self.is_contiguous() or -1 in [one for one in shape if type(one) is int]:
            raise Untraceable(f"view: {self.shape} as {shape}")
        if _product(shape) != _product(self.shape):
            raise Untraceable(f"view: {self.shape} as {shape}")
        return self._view(tuple(shape), contiguous_strides(shape))

    def flatten(self, start: int = 0) -> "Traced":
        """The dimensions from `start` on as one."""
        return self.view(*self.shape[:start], _product(self.shape[start:]))

    def unbind(self, dim: int) -> tuple["Traced", ...]:
        shape, strides = (one[:dim] + one[dim + 1 :] for one in (self.shape, self.strides))
        return tuple(self._view(shape, strides, i * self.strides[dim]) for i in range(self.shape[dim]))

    def new_empty(self, shape: Any, dtype: torch.dtype | None = None) -> "Traced":
        return self.trace.empty(tuple(shape) if isinstance(shape, tuple | list) else (shape,), dtype or self.dtype)

    def new_zeros(self, shape: Any, dtype: torch.dtype | None = None) -> "Traced":
        return self.new_empty(shape, dtype).zero_()

    def to(self, dtype: torch.dtype) -> "Traced":
        return self if dtype == self.dtype else self.trace.cast(self, dtype)

    def float(self) -> "Traced":
        return self.to(torch.float32)

    def index_select(self, dim: int, index: "Traced") -> "Traced":
        _need_first(dim)
        return self.trace.call(Tensor.index_select, [self, 0, index], (*index.shape, *self.shape[1:]), self.dtype)

    def index_add_(self, dim: int, index: "Traced", source: "Traced") -> "Traced":
        return self.trace.write(Tensor.index_add_, [self, dim, index, source])

    def addmm_(self, a: "Traced", b: "Traced") -> "Traced":
        return self.trace.write(Tensor.addmm_, [self, a, b], operands=(a, b, None), accumulates=True)

    def add_(self, other: "Traced") -> "Traced":
        return self.trace.write(Tensor.add_, [self, other])

    def zero_(self) -> "Traced":
        return self.trace.write(Tensor.zero_, [self])

    def chunk(self, parts: int) -> tuple["Traced", ...]:
        """So many parts of as many rows, views."""
        rows = self.shape[0] // parts
        if rows * parts != self.shape[0]:
            raise Untraceable(f"chunk: {self.shape} in {parts} parts")
        return tuple(
            [self._view((rows, *self.shape[1:]), self.strides, i * rows * self.strides[0]) for i in range(parts)]
        )

    def sum(self, dim: int, dtype: torch.dtype) -> "Traced":
        _need_first(dim)
        return self.trace.call(Tensor.sum, [self, 0], self.shape[1:], dtype, {"dtype": dtype})

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(function.__name__)
        if rule is None:
            raise Untraceable(f"{function.__name__} is not known")
        return rule(*args, **(kwargs or {}))

    def __len__(self) -> int:
        return self.shape[0].__index__()


def _need_first(dim: int) -> None:
    if dim != 0:
        raise Untraceable(f"dimension {dim}, not the first")


def _product(sizes: Any) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


def contiguous_strides(shape: Any) -> Shape:
    """Of a contiguous tensor."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(strides[::-1])


def _empty_like(x: Traced, dtype: torch.dtype | None = None) -> Traced:
    if not x.is_contiguous():
        raise Untraceable("empty_like: not contiguous")
    return x.trace.empty(x.shape, dtype or x.dtype)


def _linear(x: Traced, transposed: Traced, bias: Traced | None) -> Traced | None:
    """x W^T + b as PyTorch's function of W, which makes the same product with a view less; None of another product."""
    weight = transposed.t()
    if transposed.strides[0] != 1 or not weight.is_contiguous():
        return None
    given = [x, weight] if bias is None else [x, weight, bias]
    shape, operands = (x.shape[0], weight.shape[0]), (x, transposed, bias)
    return x.trace.call(torch.nn.functional.linear, given, shape, x.dtype, operands=operands)


def _mm(a: Traced, b: Traced, *, out_dtype: torch.dtype | None = None, out: Traced | None = None) -> Traced:
    if out_dtype is None and out is None and (made := _linear(a, b, None)) is not None:
        return made
    named = {} if out_dtype is None else {"out_dtype": out_dtype}
    if out is None:
        return a.trace.call(
            torch.mm, [a, b], (a.shape[0], b.shape[1]), out_dtype or a.dtype, named, operands=(a, b, None)
        )
    return a.trace.write(torch.mm, [a, b], out, named, operands=(a, b, None))


def _addmm(c: Traced, a: Traced, b: Traced, *, out_dtype: torch.dtype | None = None, out: Any = None) -> Traced:
    if out_dtype is None and out is None and (made := _linear(a, b, c)) is not None:
        return made
    named = {} if out_dtype is None else {"out_dtype": out_dtype}
    accumulates = c is out
    operands = (a, b, None if accumulates else c)
    if out is None:
        return a.trace.call(
            torch.addmm, [c, a, b], (a.shape[0], b.shape[1]), out_dtype or a.dtype, named, operands=operands
        )
    return a.trace.write(torch.addmm, [c, a, b], out, named, operands=operands, accumulates=accumulates)


def _cat(tensors: Any, dim: int = 0) -> Traced:
    _need_first(dim)
    rows: Any = sum(one.shape[0] for one in tensors)
    trace = tensors[0].trace
    together = trace.together(tensors)
    if together is not None:
        return together
    return trace.call(torch.cat, [tuple(tensors), 0], (rows, *tensors[0].shape[1:]), tensors[0].dtype)


def _stack(tensors: Any, dim: int = 0) -> Traced:
    shape = tensors[0].shape
    shape = (*shape[:dim], len(tensors), *shape[dim:])
    return tensors[0].trace.call(torch.stack, [tuple(tensors), dim], shape, tensors[0].dtype)


def _sort(x: Traced, *, stable: bool) -> tuple[Traced, ...]:
    """Values and places, of one dimension."""
    if len(x.shape) != 1:
        raise Untraceable(f"sort: {len(x.shape)} dimensions")
    return x.trace.calls(torch.sort, [x], [(x.shape, x.dtype), (x.shape, torch.int64)], {"stable": stable})


_RULES: dict[str, Callable[..., Any]] = {  # by the names of functions in `torch`
    "mm": _mm, "addmm": _addmm, "cat": _cat, "stack": _stack, "empty_like": _empty_like, "sort": _sort,
    "zeros_like": lambda x: _empty_like(x).zero_(),
}  # fmt: skip
