"""A program: all that a composite of kernels asks of a device, as data, with sizes as numbers of the call.

    expressions   integers of a call (tokens, sequences, the longest text, sites of dropout) and what follows from them
    guards        what launchers asked of these numbers when they chose, and the answers that the program is made for
    steps         memory, calls of PyTorch (products of its library), launches, in their order
    outputs       slots

A slot holds a tensor, or None. The first ones are the inputs. Places in `expressions` are written "number" below.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bert_fast.kernels._sizes import Expression

__all__ = ["Argument", "Call", "Empty", "Launch", "Program", "Step", "Window"]


class Argument(NamedTuple):
    """An argument of a `Call`. kind: "slot", "slots" (a list of tensors), "number", "numbers" (a tuple), "constant"."""

    kind: str
    value: Any


class Empty(NamedTuple):
    """Contiguous memory of this shape (numbers) on the program's device, into a slot."""

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """function(*arguments[: -len(names)], **the rest by names), its result or results into slots."""

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    names: tuple[str, ...]
    slots: tuple[int, ...]


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


class Step(NamedTuple):
    """One instruction of a program.

    last_used: the slots that neither a later step nor an output of the program reads; the step frees them.
    """

    what: Empty | Call | Launch
    last_used: tuple[int, ...]


class Program(NamedTuple):
    """See above. outputs: slots, -1 for None; guards: (number, the value that it has to have)."""

    num_inputs: int
    num_slots: int
    expressions: tuple[Expression, ...]
    guards: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
