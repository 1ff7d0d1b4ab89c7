"""What the registered ops expect of tensors, a line for each, and the check of it.

    {"x": "x T H+", "weight": "p H", "mean": "s T", "coords": "int32 T 2"}

The first word is the dtype:

    x              the leading dtype, that of the first tensor of this kind: fp32, fp16, bf16 or fp64
    p              a parameter's: the leading one or, beside half precision, fp32
    s              of statistics: fp32, fp64 beside fp64
    f              any floating one
    int            int64 or int32; int32, int64, int8: this one

The others are sizes: a number; a name, which stands for the same size throughout a call (an argument's, for its value),
`3N` for three times that of `N`, `Q+1` for one more than `Q`, `H+` for at least 1; `_` for any. Optional tensors may be
None, and all are dense and on one device.

Public functions check what they are given themselves, with the messages of their arguments. Whoever calls
`torch.ops.bert_fast` by himself comes past none of them: back-ends hand memory to routines that cannot know its size.
"""

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert_fast.checks import (
    check_dropout_p,
    check_dtype,
    check_floating,
    check_same_device,
    check_shape,
    check_site,
    check_tensor,
)
from bert_fast.ops._linear_checks import check_activation
from bert_fast.reference.precision import wide_dtype

_LEADING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_INTEGERS = {"int": (torch.int64, torch.int32), "int32": (torch.int32,), "int64": (torch.int64,), "int8": (torch.int8,)}


class Size(NamedTuple):
    """One dimension: a number, or `times` the size that `name` stands for and `more`."""

    number: int | None
    times: int
    name: str
    least: int
    more: int

    @classmethod
    def parse(cls, word: str) -> "Size":
        """Of a word as in the module's docstring."""
        times, name, plus, more = re.fullmatch(r"(\d*)([A-Za-z_]*)(\+?)(\d*)", word).groups()  # type: ignore[union-attr]
        return cls(int(word) if not name else None, int(times or 1), name, 1 if plus else 0, int(more or 0))

    def of(self, found: Mapping[str, int]) -> int:
        """The size, where all names stand for one."""
        return self.number if self.number is not None else self.times * found[self.name] + self.more


class Line(NamedTuple):
    """What is expected of one tensor."""

    kind: str
    sizes: tuple[Size, ...]

    @classmethod
    def parse(cls, text: str) -> "Line":
        """Of a line as in the module's docstring."""
        kind, *sizes = text.split()
        return cls(kind, tuple(map(Size.parse, sizes)))

    def stacked(self, count: int) -> "Line":
        """That of so many such tensors, one below the other."""
        first = self.sizes[0]
        return Line(self.kind, (first._replace(times=count * first.times), *self.sizes[1:]))

    def shape(self, found: Mapping[str, int]) -> list[int]:
        """Where all names stand for a size."""
        return [one.of(found) for one in self.sizes]


def lines_of(record: type) -> dict[str, Line]:
    """The lines of a record's tensors, `Annotated[Tensor, "x T H"]`."""
    hints = typing.get_type_hints(record, include_extras=True)
    return {name: Line.parse(hint.__metadata__[0]) for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def empty_like_lines(lines: Mapping[str, Line], given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors without values, as the lines of `names` say beside the given arguments.

    One that has the name of an argument is as that is.
    """
    tensors = {name: t for name, t in given.items() if isinstance(t, Tensor) and name in lines}
    found: dict[str, Any] = {name: value for name, value in given.items() if isinstance(value, int | torch.SymInt)}
    for name, tensor in tensors.items():
        sizes = zip(lines[name].sizes, tensor.shape, strict=True)
        found |= {size.name: actual - size.more for size, actual in sizes if size.name and size.times == 1}
    lead = next(t for name, t in tensors.items() if lines[name].kind == "x")
    dtypes = {"x": lead.dtype, "s": wide_dtype(lead.dtype), "int32": torch.int32}
    dtypes |= {"p": next((t.dtype for name, t in tensors.items() if lines[name].kind == "p"), lead.dtype)}
    return {
        name: tensors[name].new_empty(tensors[name].shape)
        if name in tensors
        else lead.new_empty(lines[name].shape(found), dtype=dtypes[lines[name].kind])
        for name in names
    }


class _Expected(NamedTuple):
    """What is expected of the tensor at one place."""

    place: int
    name: str
    kind: str
    sizes: tuple[Size, ...]


def checker(
    function: Callable[..., Any], tensors: Mapping[str, str | Line], check: Callable[..., None] | None
) -> Callable[..., None]:
    """The check of arguments of `function`: its tensors as in the module's docstring, known numbers, then `check`.

    It raises TypeError or ValueError with the argument's name.
    """
    places = {name: place for place, name in enumerate(inspect.signature(function).parameters)}
    lines = {name: Line.parse(line) if isinstance(line, str) else line for name, line in tensors.items()}
    expected = [_Expected(places[name], name, *line) for name, line in lines.items() if name in places]
    leaders = [one for one in expected if one.kind == "x"]
    counts = {size.name: places[size.name] for one in expected for size in one.sizes if size.name in places}

    def run(*arguments: Any) -> None:
        for name, argument in zip(places, arguments, strict=True):
            if isinstance(argument, Tensor) and argument.layout is not torch.strided:
                layout = str(argument.layout).removeprefix("torch.")
                raise TypeError(f"{name}: expected a dense Tensor, got layout {layout}")
        found: dict[str, int] = {name: arguments[place] for name, place in counts.items()}
        for one in expected:
            tensor = arguments[one.place]
            if tensor is not None:
                _check_sizes(one, tensor, found)
        leader = next((one for one in leaders if arguments[one.place] is not None), None)
        if leader is not None:
            lead = arguments[leader.place]
            check_dtype(leader.name, lead, _LEADING)
            for one in expected:
                if arguments[one.place] is not None:
                    _check_memory(one, arguments[one.place], leader.name, lead)
        _check_numbers(arguments, places)
        if check is not None:
            check(*arguments)

    return run


def check_given(name: str, tensor: Tensor | None, is_needed: bool) -> None:
    """Raises ValueError where a tensor that is needed is None."""
    if is_needed and tensor is None:
        raise ValueError(f"{name}: expected a Tensor, got None")


def _check_sizes(one: _Expected, tensor: Any, found: dict[str, int]) -> None:
    check_tensor(one.name, tensor)
    wanted = [size.of(found) if size.number is not None or size.name in found else size.name for size in one.sizes]
    check_shape(one.name, tensor, wanted)
    for size, actual in zip(one.sizes, tensor.shape, strict=True):
        if actual < size.least or (actual - size.more) % size.times:
            expected = f"a multiple of {size.times}" if actual >= size.least else f"at least {size.least}"
            raise ValueError(f"{one.name}: expected {expected} for {size.name}, got shape {list(tensor.shape)}")
        if size.name not in ("", "_"):
            found[size.name] = (actual - size.more) // size.times


def _check_memory(one: _Expected, tensor: Tensor, lead_name: str, lead: Tensor) -> None:
    if one.kind == "f":
        check_floating(one.name, tensor)
    else:
        check_dtype(one.name, tensor, _allowed(one.kind, lead.dtype))
    check_same_device(one.name, tensor, lead_name, lead)


def _allowed(kind: str, leading: torch.dtype) -> tuple[torch.dtype, ...]:
    if kind == "x":
        return (leading,)
    if kind == "p":
        return (leading, torch.float32) if leading in _HALF else (leading,)
    return (wide_dtype(leading),) if kind == "s" else _INTEGERS[kind]


def _check_numbers(arguments: tuple[Any, ...], places: dict[str, int]) -> None:
    """Checks the numbers and names that several ops take under one name."""
    given = {name: arguments[place] for name, place in places.items()}
    if "dropout_p" in given:
        check_dropout_p("dropout_p", given["dropout_p"])
        if given["dropout_p"]:
            for name in ("seed", "coords" if "coords" in given else "coords_q"):
                check_given(name, given[name], is_needed=True)
        check_site(given["site"])
    if "hidden_act" in given:
        check_activation(given["hidden_act"])
