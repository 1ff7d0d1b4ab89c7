"""How a program is made: a composite of kernels runs once on tensors that are not there, and what it asks for is noted.

Nothing runs and nothing is allocated. The traced tensors (`_traced.py`) have only the operations that our composites
need. A composite that uses another one, or one that a program cannot repeat, raises `Untraceable` or an error of
Python's own.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bert_fast.triton import _launch_plan
from bert_fast.triton._program import (
    Argument,
    Call,
    Empty,
    Launch,
    Matrix,
    Product,
    Program,
    What,
    Window,
    part_of,
    steps_of,
)  # fmt: skip
from bert_fast.triton._sizes import Numbers, Size
from bert_fast.triton._traced import NO_NAMES, Shape, Traced, Untraceable, contiguous_strides

Operands = tuple[Traced, Traced, Traced | None]  # of a product: a, b, bias
_ALIGNMENT = 16  # bytes; what launchers choose by


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
        self._steps: list[What] = []
        self._first_steps: list[What] = []  # views of inputs
        self._forms: list[tuple[int, ...]] = []  # of slots: sizes, strides, 0
        self._views: dict[Any, int] = {}
        # By slot of memory that no function of PyTorch has read yet: its step, and its number of elements.
        self._unseen: dict[int, tuple[int, Any]] = {}
        self._casts: dict[tuple[int, torch.dtype], Traced] = {}
        self._place_of_casts: int | None = None  # among steps

    def input(self, shape: Shape, strides: Shape | None, dtype: torch.dtype) -> Traced:
        """A tensor that every call brings along, contiguous where strides is None; None's slot is taken by `skip`."""
        assert not self._steps
        self._num_inputs += 1
        strides = contiguous_strides(shape) if strides is None else strides
        return Traced(self, self._new(self._form(shape, strides)), shape, strides, dtype)

    def input_like(self, tensor: Tensor, letters: str = "", sizes: Mapping[str, Size] = NO_NAMES) -> Traced:
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
        return tuple(map(self.numbers.place, (*shape, *(strides or contiguous_strides(shape)), 0)))

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
        made = Traced(self, slot, shape, contiguous_strides(shape), dtype)
        self._unseen[slot] = len(self._steps), made.numel()
        self._steps.append(Empty(slot, tuple(map(self.numbers.place, shape)), dtype))
        return made

    def call(
        self,
        function: Any,
        arguments: list[Any],
        shape: Shape,
        dtype: torch.dtype,
        named: Mapping[str, Any] = NO_NAMES,
        operands: Operands | None = None,
    ) -> Traced:
        """A function of PyTorch that returns a new contiguous tensor of this shape and dtype. named: constants.

        operands: of a matrix product.
        """
        given = self._arguments(arguments)
        made = Traced(self, self._new(self._form(shape)), shape, contiguous_strides(shape), dtype)
        given += [Argument("constant", one) for one in named.values()]
        product = None if operands is None else self._product(*operands, made, accumulates=False)
        self._steps.append(Call(function, tuple(given), tuple(named), (made.slot,), product))
        return made

    def calls(
        self, function: Any, arguments: list[Any], forms: list[tuple[Shape, torch.dtype]],
        named: Mapping[str, Any] = NO_NAMES,
    ) -> tuple[Traced, ...]:  # fmt: skip
        """A function of PyTorch that returns several contiguous tensors of these shapes and dtypes; named as above."""
        given = self._arguments(arguments)
        given += [Argument("constant", one) for one in named.values()]
        made = [
            Traced(self, self._new(self._form(shape)), shape, contiguous_strides(shape), dtype)
            for shape, dtype in forms
        ]
        slots = tuple([one.slot for one in made])
        self._steps.append(Call(function, tuple(given), tuple(named), slots))
        return tuple(made)

    def write(
        self,
        function: Any,
        arguments: list[Any],
        out: Traced | None = None,
        named: Mapping[str, Any] = NO_NAMES,
        operands: Operands | None = None,
        accumulates: bool = False,
    ) -> Traced:
        """A function of PyTorch that writes to its first argument, or to `out`; which is returned.

        operands: of a matrix product. accumulates: it is added to what is there.
        """
        target: Traced = arguments[0] if out is None else out
        if target.slot < self._num_inputs:
            raise Untraceable("an argument is written to")
        given = self._arguments(arguments)
        named_given = {name: Argument("constant", one) for name, one in named.items()}
        if out is not None:
            named_given["out"] = Argument("slot", self._whole(out))
        product = None if operands is None else self._product(*operands, target, accumulates)
        self._steps.append(Call(function, (*given, *named_given.values()), tuple(named_given), (), product))
        return target

    def _product(self, a: Traced, b: Traced, bias: Traced | None, out: Traced, accumulates: bool) -> Product | None:
        """The product that a function makes; None if cuBLAS would need copies of matrices or another dtype."""
        matrices = [self._matrix(one) for one in (a, b, out)]
        if None in matrices or a.dtype != b.dtype or matrices[-1].is_transposed:
            return None
        if bias is not None and (bias.dtype != out.dtype or len(bias.shape) != 1 or not bias.is_contiguous()):
            return None
        place = self.numbers.place
        of_bias = None if bias is None else (bias.slot, place(bias.offset))
        sizes = place(a.shape[0]), place(a.shape[1]), place(b.shape[1])
        return Product(*matrices, of_bias, *sizes, accumulates, torch.backends.cuda.matmul.allow_tf32)

    def _matrix(self, x: Traced) -> Matrix | None:
        """Where a matrix lies; None if cuBLAS does not take it as it is."""
        if len(x.shape) != 2 or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return None
        row, column = x.strides
        are_side_by_side = [type(one) is int and one == 1 for one in (column, row)]
        if not any(are_side_by_side):
            return None
        is_transposed = not are_side_by_side[0]
        leading = self.numbers.place(column if is_transposed else row)
        return Matrix(x.slot, self.numbers.place(x.offset), leading, is_transposed, x.dtype)

    def _arguments(self, arguments: list[Any]) -> list[Argument]:
        given: list[Argument] = []
        for one in arguments:
            if isinstance(one, Traced):
                given.append(Argument("slot", self._whole(one)))
            elif isinstance(one, tuple) and one and isinstance(one[0], Traced):
                given.append(Argument("slots", tuple(map(self._whole, one))))
            elif type(one) is Size:
                given.append(Argument("number", one.place))
            else:
                given.append(Argument("constant", one))
        return given

    def _whole(self, x: Traced) -> int:
        """Returns the slot of a tensor for PyTorch's functions; adds a step for a view if the slot has another form."""
        form = tuple(map(self.numbers.place, (*x.shape, *x.strides, x.offset)))
        if self._forms[x.slot] == form:
            self._unseen.pop(x.slot, None)
            return x.slot
        known = self._views.get((x.slot, form))
        if known is not None:
            return known
        dims, (index, size) = len(x.shape), self._unseen.pop(x.slot, (None, 0))
        if index is not None and x.offset == 0 and x.numel() == size and x.is_contiguous():
            # Only launches have used this memory so far, so it is allocated with that shape and needs no view.
            self._steps[index] = self._steps[index]._replace(shape=form[:dims])
            self._forms[x.slot] = form
            return x.slot
        made = self._views[x.slot, form] = self._new(form)
        first = self.numbers.place(x.offset // x.element_size())
        given = ("slot", x.slot), ("numbers", form[:dims]), ("numbers", form[dims:-1]), ("number", first)
        what = Call(part_of, tuple([Argument(*one) for one in given]), (), (made,))
        (self._first_steps if x.slot < self._num_inputs else self._steps).append(what)
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
                self._steps.append(Call(torch._foreach_copy_, (), (), ()))
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
        self._steps.append(Launch(plan, tuple(map(place, grid)), at, given, tuple(windows)))

    def spoil(self) -> None:
        """Something was asked for that no program can do."""
        raise Untraceable("a kernel wants a workspace")

    def program(self, made: tuple[Traced | None, ...]) -> Program:
        """The program of a call that returned this."""
        outputs = tuple([-1 if one is None else self._whole(one) for one in made])
        steps = steps_of([*self._first_steps, *self._with_casts()], self._num_inputs, outputs)
        return Program(
            self._num_inputs, len(self._forms), tuple(self.numbers.expressions), tuple(self.numbers.guards.items()),
            steps, outputs,
        )  # fmt: skip

    def _with_casts(self) -> list[What]:
        first = self._place_of_casts
        if first is None:
            return self._steps
        to, of = [*self._casts.values()], [source for source, _ in self._casts]
        memory = [Empty(one.slot, tuple(map(self.numbers.place, one.shape)), one.dtype) for one in to]
        together = Argument("slots", tuple([one.slot for one in to])), Argument("slots", tuple(of))
        casts = self._steps[first]._replace(arguments=together)
        return [*self._steps[:first], *memory, casts, *self._steps[first + 1 :]]
