"""A program: all that a composite of kernels asks of a device, as data, with sizes as numbers of the call.

    expressions   integers of a call (tokens, sequences, the longest text, sites of dropout) and what follows from them
    guards        what launchers asked of these numbers when they chose, and the answers that the program is made for
    steps         memory, calls of PyTorch, matrix products, launches, in their order
    outputs       slots

A slot holds a tensor, or None. The first ones are the inputs. Places in `expressions` are written "number" below.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert_fast.triton._sizes import Expression


def _find_part_of() -> Callable[..., Tensor]:
    """Returns the function (tensor, sizes, strides, elements from the tensor's first) that makes a view.

    PyTorch's compiler uses `_reinterpret_tensor`, which does not go through the dispatcher. It is not public. Without
    it `as_strided` makes the view.
    """
    known: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", None)
    if known is not None:
        return known
    return lambda tensor, sizes, strides, first: tensor.as_strided(sizes, strides, tensor.storage_offset() + first)


part_of = _find_part_of()


class Argument(NamedTuple):
    """An argument of a `Call`. kind: "slot", "slots" (a list of tensors), "number", "numbers" (a tuple), "constant"."""

    kind: str
    value: Any


class Empty(NamedTuple):
    """Contiguous memory of this shape (numbers) on the program's device, into a slot."""

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Matrix(NamedTuple):
    """A matrix in memory, from so many bytes (a number) behind the beginning of its slot.

    Elements of a row lie side by side, or elements of a column if it is transposed. leading: elements from one row
    (column) to the next, a number.
    """

    slot: int
    offset: int
    leading: int
    is_transposed: bool
    dtype: torch.dtype


class Product(NamedTuple):
    """out = a b + bias, or out += a b, for a [rows, inner], b [inner, cols] and out [rows, cols]; sizes are numbers.

    bias: slot and bytes (a number) of `cols` elements of out's dtype. workspace: a slot and its bytes (a number), set
    for products by address.
    """

    a: Matrix
    b: Matrix
    out: Matrix
    bias: tuple[int, int] | None
    rows: int
    inner: int
    cols: int
    accumulates: bool
    allows_tf32: bool
    workspace: tuple[int, int] = (-1, -1)


class Call(NamedTuple):
    """function(*arguments[: -len(names)], **the rest by names), its result or results into slots.

    product: what the function computes, if that is known and the matrices lie as cuBLAS takes them.
    """

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    names: tuple[str, ...]
    slots: tuple[int, ...]
    product: Product | None = None


class Window(NamedTuple):
    """An operand that a kernel takes as a tensor descriptor: its place, sizes and row stride (numbers), the tile."""

    place: int
    rows: int
    cols: int
    row_stride: int
    tile: tuple[int, int]


class Launch(NamedTuple):
    """One launch of a plan.

    operands: (slot, bytes from there, which is a number) or None, in the plan's order. numbers: in the plan's order,
    True with the number of an integer, False with a float.
    """

    plan: Any
    grid: tuple[int, ...]
    operands: tuple[tuple[int, int] | None, ...]
    numbers: tuple[tuple[bool, Any], ...]
    windows: tuple[Window, ...]


What = Empty | Call | Product | Launch


class Step(NamedTuple):
    """One instruction of a program.

    last_used: the slots that neither a later step nor an output of the program reads; the step frees them.
    """

    what: What
    last_used: tuple[int, ...]


class Program(NamedTuple):
    """See above. outputs: slots, -1 for None; guards: (number, the value that it has to have)."""

    num_inputs: int
    num_slots: int
    expressions: tuple[Expression, ...]
    guards: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


def steps_of(order: Sequence[What], num_inputs: int, outputs: Sequence[int]) -> tuple[Step, ...]:
    """Returns the steps of a program in this order, without memory and views that no step reads."""
    needed = {slot for slot in outputs if slot >= 0}
    kept: list[Step] = []
    for what in reversed(order):
        slots = _slots_of(what)
        is_idle = type(what) is Empty or (type(what) is Call and what.function is part_of)
        if is_idle and slots[-1] not in needed:
            continue
        last_used = [slot for slot in dict.fromkeys(slots) if slot >= num_inputs and slot not in needed]
        kept.append(Step(what, tuple(last_used)))
        needed.update(slots)
    return tuple(kept[::-1])


def scratch_of(program: Program) -> tuple[int, ...]:
    """Returns slots of memory, and of views of it, that only the program's steps ever see."""
    seen = {slot for slot in program.outputs if slot >= 0}
    for what, _ in reversed(program.steps):
        # A view is memory of its source. What another function returns may be, too, unless it is a product.
        if type(what) is not Call or not what.slots or what.product is not None:
            continue
        if what.function is not part_of or what.slots[0] in seen:
            seen.update(_slots_of(what))
    scratch: list[int] = []
    for what, _ in program.steps:
        if type(what) is Empty and what.slot not in seen:
            scratch.append(what.slot)
        elif type(what) is Call and what.function is part_of:
            source, made = _slots_of(what)
            if source in scratch and made not in seen:
                scratch.append(made)
    return tuple(scratch)


def _slots_of(what: What) -> list[int]:
    """Returns the slots that a step reads, followed by those that it fills."""
    if type(what) is Empty:
        return [what.slot]
    if type(what) is Launch:
        return [one[0] for one in what.operands if one is not None]
    if type(what) is Product:
        bias = [] if what.bias is None else [what.bias[0]]
        return [what.a.slot, what.b.slot, *bias, what.workspace[0], what.out.slot]
    assert type(what) is Call
    slots: list[int] = []
    for kind, value in what.arguments:
        slots += [value] if kind == "slot" else value if kind == "slots" else []
    return [*slots, *[slot for slot in what.slots if slot >= 0]]
