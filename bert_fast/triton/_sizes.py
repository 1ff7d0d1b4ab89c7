"""Sizes of a call that a program is made of: integers that remember what was computed from them, and what was asked.

Launchers choose by sizes: how many programs, which tile. Run on sizes of this class, they leave two things behind: each
number that they came to, as an expression of the call's numbers, and each answer that they acted on (is it above 128?),
as a guard. A program made so is right for all calls that answer the same. What cannot be followed (an index, a shape of
PyTorch's) asks for the value itself, and the program is for that value alone.
"""

from typing import Any, NamedTuple


class Expression(NamedTuple):
    """One integer. op: "argument" (the call's a-th), "constant" (a), or of two earlier expressions a and b.

    These are + - * // % (of Python: floors), < <= == (1 or 0), min and max.
    """

    op: str
    a: int
    b: int = 0


class Numbers:
    """The expressions of a program in the making, none of them twice, and the guards.

    arguments: the call's integers; those of the call that the program is made for.
    """

    def __init__(self, arguments: tuple[int, ...]) -> None:
        self.expressions: list[Expression] = []
        self._values: list[int] = []
        self._places: dict[Expression, int] = {}
        self.guards: dict[int, int] = {}  # by place, the value that it must have
        self.arguments = [self._size(Expression("argument", i), value) for i, value in enumerate(arguments)]

    def place(self, number: "int | Size") -> int:
        """Where an integer stands among the expressions."""
        if isinstance(number, Size):
            return number.place
        return self._size(Expression("constant", number), number).place

    def result(self, op: str, a: "int | Size", b: "int | Size") -> "Size":
        """a op b as a number of this program."""
        x, y = _value(a), _value(b)
        if op in ("//", "%") and type(b) is Size:
            self.ask("==", b, 0)  # of other calls, too
        return self._size(Expression(op, self.place(a), self.place(b)), int(_OPS[op](x, y)))

    def ask(self, op: str, a: "int | Size", b: "int | Size") -> bool:
        """The answer to a comparison, on which the caller will act."""
        found = self.result(op, a, b)
        self.guards[found.place] = found.value
        return bool(found.value)

    def _size(self, expression: Expression, value: int) -> "Size":
        place = self._places.setdefault(expression, len(self.expressions))
        if place == len(self.expressions):
            self.expressions.append(expression)
            self._values.append(value)
        return Size(self, place, value)


_OPS: dict[str, Any] = {
    "+": int.__add__, "-": int.__sub__, "*": int.__mul__, "//": int.__floordiv__, "%": int.__mod__, "<": int.__lt__,
    "<=": int.__le__, "==": int.__eq__, "min": min, "max": max,
}  # fmt: skip


def evaluate(expressions: tuple[Expression, ...], arguments: tuple[int, ...]) -> list[int]:
    """The values of all expressions for a call with these integers."""
    values: list[int] = []
    for op, a, b in expressions:
        if op == "argument":
            values.append(arguments[a])
        elif op == "constant":
            values.append(a)
        else:
            x, y = values[a], values[b]
            values.append(0 if not y and op in ("//", "%") else int(_OPS[op](x, y)))  # a guard will say no
    return values


class Size:
    """An integer of a call, or one that was computed from such. No int: what takes one has to ask for its value."""

    __slots__ = ("_numbers", "place", "value")
    __hash__ = None  # type: ignore[assignment]  # what was remembered for one size must not answer for another

    def __init__(self, numbers: Numbers, place: int, value: int) -> None:
        self._numbers, self.place, self.value = numbers, place, value

    def __add__(self, other: "int | Size") -> "Size":
        return self if _is(other, 0) else self._numbers.result("+", self, other)

    __radd__ = __add__

    def __sub__(self, other: "int | Size") -> "Size":
        return self if _is(other, 0) else self._numbers.result("-", self, other)

    def __rsub__(self, other: int) -> "Size":
        return self._numbers.result("-", other, self)

    def __neg__(self) -> "Size":
        return self._numbers.result("-", 0, self)

    def __mul__(self, other: "int | Size") -> "Size":
        return self if _is(other, 1) else self._numbers.result("*", self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: "int | Size") -> "Size":
        return self if _is(other, 1) else self._numbers.result("//", self, other)

    def __rfloordiv__(self, other: int) -> "Size":
        return self._numbers.result("//", other, self)

    def __mod__(self, other: "int | Size") -> "Size":
        return self._numbers.result("%", self, other)

    def __rmod__(self, other: int) -> "Size":
        return self._numbers.result("%", other, self)

    def __lt__(self, other: "int | Size") -> bool:
        return not self._is_same(other) and self._numbers.ask("<", self, other)

    def __le__(self, other: "int | Size") -> bool:
        return self._is_same(other) or self._numbers.ask("<=", self, other)

    def __gt__(self, other: "int | Size") -> bool:
        return not self._is_same(other) and self._numbers.ask("<", other, self)

    def __ge__(self, other: "int | Size") -> bool:
        return self._is_same(other) or self._numbers.ask("<=", other, self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, float):
            raise TypeError("a size was compared with a float, of which no guard would tell")
        if not isinstance(other, int | Size):
            return NotImplemented
        return self._is_same(other) or self._numbers.ask("==", self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        self._numbers.ask("==", self, self.value)
        return self.value

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def bit_length(self) -> int:
        """As of an int that is not negative."""
        bits = self.value.bit_length()
        if not (self >= (1 << bits >> 1) and self < 1 << bits):  # no `assert`: it asks
            raise ValueError(f"bit_length: expected a size that is not negative, got {self.value}")
        return bits

    def _is_same(self, other: object) -> bool:
        return type(other) is Size and other.place == self.place and other._numbers is self._numbers


def _value(number: "int | Size") -> int:
    return number.value if type(number) is Size else number  # type: ignore[return-value]


def _is(number: "int | Size", value: int) -> bool:
    return type(number) is not Size and number == value


def smaller(a: Any, b: Any) -> Any:
    """min(a, b) of two integers, without a guard where they are sizes."""
    for one in (a, b):
        if type(one) is Size:
            return one._numbers.result("min", a, b)
    return min(a, b)


def larger(a: Any, b: Any) -> Any:
    """max(a, b) of two integers, without a guard where they are sizes."""
    for one in (a, b):
        if type(one) is Size:
            return one._numbers.result("max", a, b)
    return max(a, b)
