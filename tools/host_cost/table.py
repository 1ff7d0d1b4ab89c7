"""From counts of steps with few layers to a layer and to a step of twelve."""

from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["PRECISIONS", "RECORD", "Row", "lines", "rows"]

RECORD = Path(__file__).resolve().parents[2] / "tests" / "host_cost.json"
PRECISIONS = ("autocast", "bf16")
_FEW, _MANY, _LAYERS = 2, 4, 12  # layers of `cases.py`, and of the model that is told of
Row = tuple[str, int, int]  # what, ours, transformers'


def rows(found: Mapping[str, int]) -> list[Row]:
    """A layer, both passes of a step of twelve layers, and with the optimizer and clipping."""
    made = []
    for case, precision in dict.fromkeys(map(_case, found)):

        def of(kind: str, layers: int, *parts: str, case: str = case, precision: str = precision) -> int:
            return sum(found[f"{case}, {precision}, {kind}, {layers}, {part}"] for part in parts)

        def all_layers(kind: str, *parts: str) -> int:
            few, many = of(kind, _FEW, *parts), of(kind, _MANY, *parts)  # noqa: B023
            return few + (many - few) * (_LAYERS - _FEW) // (_MANY - _FEW)

        def layer(kind: str, *parts: str) -> int:
            return (of(kind, _MANY, *parts) - of(kind, _FEW, *parts)) // (_MANY - _FEW)  # noqa: B023

        passes = ("forward", "backward")
        for label, function, parts in (
            ("a layer, forward", layer, passes[:1]),
            ("a layer, both passes", layer, passes),
            ("forward and backward", all_layers, passes),
            ("optimizer", all_layers, ("optimize",)),
            ("step", all_layers, (*passes, "optimize")),
        ):
            made.append((f"{case}, {precision}: {label}", function("ours", *parts), function("transformers", *parts)))
    return made


def _case(label: str) -> tuple[str, str]:
    *case, precision, _, _, _ = label.split(", ")
    return ", ".join(case), precision


def lines(of: Iterable[Row]) -> list[str]:
    """A table, in millions of instructions."""
    return [f"{what:<60}{a / 1e6:>9.3f}{b / 1e6:>9.3f}{a / b:>7.2f}" for what, a, b in of]
