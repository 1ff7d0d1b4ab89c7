"""What a goal is: a bound, and the figures of stored results that must keep to it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]
Figures = Callable[[Sequence["Line"]], Iterable["Figure"]]


@dataclass(frozen=True)
class Figure:
    """One figure that a goal is about; value: None where nothing is stored."""

    what: str
    value: float | None


@dataclass(frozen=True)
class Goal:
    """A bound and the figures that must keep to it.

    device: "gpu" (each GPU that has results) or "cpu". figures: from the lines of one machine; all that are wanted,
    measured or not. digits: of a figure in another unit than "x" and "%".
    """

    title: str
    bound: float
    figures: Figures
    device: str = "gpu"
    is_upper: bool = False
    unit: str = "x"
    digits: int = 0

    def is_met(self, value: float) -> bool:
        """Whether a figure keeps to the bound."""
        return value <= self.bound if self.is_upper else value >= self.bound

    def shown(self, value: float) -> str:
        """A figure in the goal's unit."""
        if self.unit in ("%", "x"):
            return f"{value:.0%}" if self.unit == "%" else f"{value:.2f}x"
        return f"{value:,.{self.digits}f}{self.unit}"
