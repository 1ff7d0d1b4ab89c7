"""How a program is made: a composite of kernels runs once on tensors that are not there, and what it asks for is noted.

Each tensor has a dtype, a device, sizes (some of them numbers of the call, `_sizes.py`) and strides; it is a slot of
the program, or a part of one. Nothing runs and nothing is allocated. A composite that does what no program can do
again, or that nobody has taught these tensors, raises `Untraceable` or an error of Python's own.
"""

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bert_fast.kernels import _launch_plan
from bert_fast.kernels._program import Argument, Call, Empty, Launch, Program, Step, Window
from bert_fast.kernels._sizes import Numbers, Size

__all__ = ["Trace", "Traced", "Untraceable"]

_NO_NAMES: Mapping[str, Any] = MappingProxyType({})
Number = int | Size
Shape = tuple[Any, ...]
_ALIGNMENT = 16  # bytes; what launchers choose by
_FAR = 1 << 44  # bytes between the imagined addresses of two slots: more than any tensor has


class Untraceable(Exception):
    """There is no program for such a call."""


class Traced:
    """A tensor while a program is made. offset: bytes from the beginning of its slot, whose dtype it has."""

    def __init__(
        self, trace: "Trace", slot: int, shape: Shape, strides: Shape, dtype: torch.dtype, offset: Number = 0
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

    def numel(self) -> Number:
        return _product(self.shape)

    def data_ptr(self) -> Any:
        """An address that only this place has, aligned as the place is."""
        return (self.slot + 1) * _FAR + self.trace.skews.get(self.slot, 0) + self.offset

    def is_contiguous(self) -> bool:
        return all(
            (type(stride) is type(wanted) and stride == wanted) or size == 1
            for size, stride, wanted in zip(self.shape, self.strides, _strides(self.shape), strict=True)
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
        return self._view(tuple(shape), _strides(shape))

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
        return self.trace.write(Tensor.addmm_, [self, a, b])

    def add_(self, other: "Traced") -> "Traced":
        return self.trace.write(Tensor.add_, [self, other])

    def zero_(self) -> "Traced":
        return self.trace.write(Tensor.zero_, [self])

    def chunk(self, parts: int) -> tuple["Traced", ...]:
        """So many parts of as many rows, views."""
        rows = self.shape[0] // parts
        if rows * parts != self.shape[0]:
            raise Untraceable(f"chunk: {self.shape} in {parts} parts")
        return self.trace.calls(Tensor.chunk, [self, parts], [(rows, *self.shape[1:])] * parts, self.dtype)

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


def _strides(shape: Any) -> Shape:
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
    return x.trace.call(torch.nn.functional.linear, given, (x.shape[0], weight.shape[0]), x.dtype)


def _mm(a: Traced, b: Traced, *, out_dtype: torch.dtype | None = None, out: Traced | None = None) -> Traced:
    if out_dtype is None and out is None and (made := _linear(a, b, None)) is not None:
        return made
    named = {} if out_dtype is None else {"out_dtype": out_dtype}
    if out is None:
        return a.trace.call(torch.mm, [a, b], (a.shape[0], b.shape[1]), out_dtype or a.dtype, named)
    return a.trace.write(torch.mm, [a, b], out, named)


def _addmm(c: Traced, a: Traced, b: Traced, *, out_dtype: torch.dtype | None = None, out: Any = None) -> Traced:
    if out_dtype is None and out is None and (made := _linear(a, b, c)) is not None:
        return made
    named = {} if out_dtype is None else {"out_dtype": out_dtype}
    if out is None:
        return a.trace.call(torch.addmm, [c, a, b], (a.shape[0], b.shape[1]), out_dtype or a.dtype, named)
    return a.trace.write(torch.addmm, [c, a, b], out, named)


def _cat(tensors: Any, dim: int = 0) -> Traced:
    _need_first(dim)
    rows: Any = sum(one.shape[0] for one in tensors)
    trace: Trace = tensors[0].trace
    together = trace.together(tensors)
    if together is not None:
        return together
    return trace.call(torch.cat, [tuple(tensors), 0], (rows, *tensors[0].shape[1:]), tensors[0].dtype)


def _stack(tensors: Any, dim: int = 0) -> Traced:
    shape = tensors[0].shape
    shape = (*shape[:dim], len(tensors), *shape[dim:])
    return tensors[0].trace.call(torch.stack, [tuple(tensors), dim], shape, tensors[0].dtype)


_RULES: dict[str, Callable[..., Traced]] = {  # by the names of functions in `torch`
    "mm": _mm, "addmm": _addmm, "cat": _cat, "stack": _stack, "empty_like": _empty_like,
    "zeros_like": lambda x: _empty_like(x).zero_(),
}  # fmt: skip


class Trace:
    """The program of one call in the making, of one thread.

    device: what tensors are on. arguments: the call's integers.
    """

    def __init__(self, device: torch.device, arguments: tuple[int, ...]) -> None:
        self.device = device
        self.device_index = -1 if device.type == "cpu" else device.index
        self.numbers = Numbers(arguments)
        self._joined: dict[tuple[int, ...], Traced] = {}
        self._num_inputs = 0
        self.skews: dict[int, int] = {}  # of inputs, bytes behind a multiple of 16
        self._steps: list[tuple[Any, list[int]]] = []  # with the slots that a step reads or makes
        self._first_steps: list[tuple[Any, list[int]]] = []  # views of inputs
        self._forms: list[tuple[int, ...]] = []  # of slots: sizes, strides, 0
        self._views: dict[Any, int] = {}
        self._unseen: dict[int, int] = {}  # memory that was not given to PyTorch yet, and its step
        self._casts: dict[tuple[int, torch.dtype], Traced] = {}
        self._place_of_casts: int | None = None

    def input(self, shape: Shape, strides: Shape | None, dtype: torch.dtype) -> Traced:
        """A tensor that every call brings along, contiguous where strides is None; None's slot is taken by `skip`."""
        assert not self._steps
        self._num_inputs += 1
        strides = _strides(shape) if strides is None else strides
        return Traced(self, self._new(self._form(shape, strides)), shape, strides, dtype)

    def input_like(self, tensor: Tensor, letters: str = "", sizes: Mapping[str, Size] = _NO_NAMES) -> Traced:
        """An input as this one is. letters: of each dimension, the name of its size; "_", or none: a constant."""
        letters = letters if len(letters) == tensor.dim() else "_" * tensor.dim()
        shape = tuple([sizes.get(letter, size) for letter, size in zip(letters, tensor.shape, strict=True)])
        made = self.input(shape, None if tensor.is_contiguous() else tensor.stride(), tensor.dtype)
        self.skews[made.slot] = tensor.data_ptr() % _ALIGNMENT
        return made

    def join(self, parts: list[Traced], whole: Traced) -> None:
        """Says that inputs lie side by side, and which input they are together."""
        self._joined[tuple([one.slot for one in parts])] = whole

    def together(self, parts: Any) -> Traced | None:
        """The input that these are together, or the rows of one."""
        slots = tuple([one.slot for one in parts if one.offset == 0])
        for all_slots, whole in self._joined.items():
            for start in range(len(all_slots) - len(slots) + 1):
                if all_slots[start : start + len(slots)] == slots:
                    rows = sum(one.shape[0] for one in parts)
                    first = start * (whole.shape[0] // len(all_slots))
                    shape = (rows, *whole.shape[1:])
                    return (
                        whole if shape == whole.shape else whole._view(shape, whole.strides, first * whole.strides[0])
                    )
        return None

    def skip(self) -> None:
        """An input that is None."""
        self._num_inputs += 1
        self._new(())

    def _form(self, shape: Shape, strides: Shape | None = None) -> tuple[int, ...]:
        return tuple(map(self.numbers.place, (*shape, *(strides or _strides(shape)), 0)))

    def _new(self, form: tuple[int, ...]) -> int:
        self._forms.append(form)
        return len(self._forms) - 1

    def __enter__(self) -> "Trace":
        _launch_plan.recorders[threading.get_ident()] = self
        return self

    def __exit__(self, *exception: Any) -> None:
        _launch_plan.recorders.pop(threading.get_ident(), None)

    def empty(self, shape: Shape, dtype: torch.dtype) -> Traced:
        """Memory, contiguous."""
        slot = self._new(self._form(shape))
        self._unseen[slot] = len(self._steps)
        self._steps.append((Empty(slot, tuple(map(self.numbers.place, shape)), dtype), [slot]))
        return Traced(self, slot, shape, _strides(shape), dtype)

    def call(
        self,
        function: Any,
        arguments: list[Any],
        shape: Shape,
        dtype: torch.dtype,
        named: Mapping[str, Any] = _NO_NAMES,
    ) -> Traced:
        """A function of PyTorch that returns a new contiguous tensor of this shape and dtype. named: constants."""
        given, reads = self._arguments(arguments)
        slot = self._new(self._form(shape))
        names = tuple(named)
        given += [Argument("constant", one) for one in named.values()]
        self._steps.append((Call(function, tuple(given), names, (slot,)), [*reads, slot]))
        return Traced(self, slot, shape, _strides(shape), dtype)

    def calls(self, function: Any, arguments: list[Any], shapes: list[Shape], dtype: torch.dtype) -> tuple[Traced, ...]:
        """A function of PyTorch that returns several tensors of rows of its first argument."""
        given, reads = self._arguments(arguments)
        made = [Traced(self, self._new(self._form(shape)), shape, _strides(shape), dtype) for shape in shapes]
        slots = tuple([one.slot for one in made])
        self._steps.append((Call(function, tuple(given), (), slots), [*reads, *slots]))
        return tuple(made)

    def write(
        self, function: Any, arguments: list[Any], out: Traced | None = None, named: Mapping[str, Any] = _NO_NAMES
    ) -> Traced:
        """A function of PyTorch that writes to its first argument, or to `out`; which is returned."""
        target: Traced = arguments[0] if out is None else out
        if target.slot < self._num_inputs:
            raise Untraceable("an argument is written to")
        given, reads = self._arguments(arguments)
        named_given = {name: Argument("constant", one) for name, one in named.items()}
        if out is not None:
            named_given["out"] = Argument("slot", self._whole(out))
            reads.append(named_given["out"].value)
        what = Call(function, (*given, *named_given.values()), tuple(named_given), ())
        self._steps.append((what, reads))
        return target

    def _arguments(self, arguments: list[Any]) -> tuple[list[Argument], list[int]]:
        given, reads = [], []
        for one in arguments:
            if isinstance(one, Traced):
                given.append(Argument("slot", self._whole(one)))
                reads.append(given[-1].value)
            elif isinstance(one, tuple) and one and isinstance(one[0], Traced):
                given.append(Argument("slots", tuple(map(self._whole, one))))
                reads.extend(given[-1].value)
            elif type(one) is Size:
                given.append(Argument("number", one.place))
            else:
                given.append(Argument("constant", one))
        return given, reads

    def _whole(self, x: Traced) -> int:
        """The slot of a tensor as PyTorch's functions take it: a view is made where a slot lies otherwise."""
        form = tuple(map(self.numbers.place, (*x.shape, *x.strides, x.offset)))
        if self._forms[x.slot] == form:
            self._unseen.pop(x.slot, None)
            return x.slot
        known = self._views.get((x.slot, form))
        if known is not None:
            return known
        if x.offset == 0 and x.is_contiguous():
            made = self._reshaped(x, form)
        elif x.slot < self._num_inputs and type(x.offset) is int and x.is_contiguous():
            made = self._rows_of_input(x, form)
        elif len(x.shape) == 2 and x.strides[0] == 1:
            made = self._new(form)
            base = self._whole(x.t())
            self._steps.append((Call(Tensor.t, (Argument("slot", base),), (), (made,)), [base, made]))
        else:
            raise Untraceable(f"a part of a tensor, {x.shape} with strides {x.strides}, is given to PyTorch")
        self._views[x.slot, form] = made
        return made

    def _rows_of_input(self, x: Traced, form: tuple[int, ...]) -> int:
        made, first = self._new(form), x.offset // (x.strides[0] * x.element_size())
        given = Argument("slot", x.slot), *[Argument("constant", one) for one in (0, first, x.shape[0])]
        self._first_steps.append((Call(Tensor.narrow, given, (), (made,)), [x.slot, made]))
        return made

    def _reshaped(self, x: Traced, form: tuple[int, ...]) -> int:
        """A contiguous tensor under another shape; memory that nobody but kernels has seen gets that shape itself."""
        shape = form[: len(x.shape)]
        index = self._unseen.pop(x.slot, None)
        if index is not None:
            empty, reads = self._steps[index]
            self._steps[index] = empty._replace(shape=shape), reads
            self._forms[x.slot] = form
            return x.slot
        made = self._new(form)
        what = Call(Tensor.view, (Argument("slot", x.slot), Argument("numbers", shape)), (), (made,))
        self._steps.append((what, [x.slot, made]))
        return made

    def cast(self, x: Traced, dtype: torch.dtype) -> Traced:
        """x in another dtype; inputs all in one call, where the first of them is wanted."""
        if not x.is_contiguous():
            raise Untraceable("a tensor that is not contiguous is cast")
        if x.slot >= self._num_inputs:
            return self.call(Tensor.to, [x, dtype], x.shape, dtype)
        source = self._whole(x)
        made = self._casts.get((source, dtype))
        if made is None:
            slot = self._new(self._form(x.shape))
            made = self._casts[source, dtype] = Traced(self, slot, x.shape, x.strides, dtype)
            if self._place_of_casts is None:
                self._place_of_casts = len(self._steps)
                self._steps.append((None, []))
        return made

    def note_launch(
        self, plan: Any, grid: tuple[Any, ...], operands: tuple[Any, ...], numbers: tuple[Any, ...]
    ) -> None:
        """A launch of a plan, as `LaunchPlan.__call__` takes it."""
        place = self.numbers.place
        at = tuple([None if one is None else (one.slot, place(one.offset)) for one in operands])
        windows = []
        for i, (one, tile) in enumerate(zip(operands, plan.windows, strict=False)):
            if tile is not None and one is not None:
                (rows, cols), row_stride = map(place, one.shape), place(one.strides[0])
                windows.append(Window(i, rows, cols, row_stride, tile))
        for one, is_specialised in zip(numbers, plan.are_specialised(len(operands)), strict=False):
            if is_specialised and type(one) is Size:  # a kernel of its own for 1, and for multiples of 16
                bool(one == 1 or one % 16 == 0)
        given = tuple([(False, one) if isinstance(one, float) else (True, place(one)) for one in numbers])
        what = Launch(plan, tuple(map(place, grid)), at, given, tuple(windows))
        self._steps.append((what, [slot[0] for slot in at if slot is not None]))

    def spoil(self) -> None:
        """Something was asked for that no program can do."""
        raise Untraceable("a kernel wants a workspace")

    def program(self, made: tuple[Traced | None, ...]) -> Program:
        """The program of a call that returned this."""
        outputs = tuple([-1 if one is None else self._whole(one) for one in made])
        steps = [*self._first_steps, *self._with_casts()]
        # Backwards: what nobody reads is not made, and what is read for the last time goes.
        needed = {slot for slot in outputs if slot >= 0}
        kept: list[Step] = []
        for what, slots in reversed(steps):
            if type(what) is Empty and what.slot not in needed:
                continue
            used = [slot for slot in dict.fromkeys(slots) if slot >= self._num_inputs and slot not in needed]
            kept.append(Step(what, tuple(used)))
            needed.update(slots)
        return Program(
            self._num_inputs, len(self._forms), tuple(self.numbers.expressions), tuple(self.numbers.guards.items()),
            tuple(kept[::-1]), outputs,
        )  # fmt: skip

    def _with_casts(self) -> list[tuple[Any, list[int]]]:
        if self._place_of_casts is None:
            return self._steps
        pairs = [(source, one) for (source, _), one in self._casts.items()]
        steps: list[tuple[Any, list[int]]] = []
        for _, one in pairs:
            steps.append((Empty(one.slot, tuple(map(self.numbers.place, one.shape)), one.dtype), [one.slot]))
        to, of = [one.slot for _, one in pairs], [source for source, _ in pairs]
        together = Argument("slots", tuple(to)), Argument("slots", tuple(of))
        steps.append((Call(torch._foreach_copy_, together, (), ()), [*to, *of]))
        first = self._place_of_casts
        return [*self._steps[:first], *steps, *self._steps[first + 1 :]]
