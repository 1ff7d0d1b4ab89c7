"""The table of what steps ask of a GPU and of the host in numbers that do not vary, and which of them rose."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from tools.null_driver.counting import count
from tools.null_driver.driver import NullDriver
from tools.null_driver.steps import CLASSES, PARTS, PRECISIONS, make_step

RECORD = Path(__file__).resolve().parents[2] / "tests" / "launches.json"
# Step -> part -> {"launches": {kernel: n}, "tensor maps": n, "products": n, "small": {operator: n}, "python calls": n}
Table = dict[str, dict[str, dict[str, Any]]]


def measure(driver: NullDriver, only: str = "") -> Table:
    """All steps whose name holds `only`."""
    wanted = {
        **{f"layer {precision}": ("BertModel", precision, "layer") for precision in PRECISIONS},
        **{f"BertModel {precision}": ("BertModel", precision, "bert_fast") for precision in PRECISIONS},
        **{f"{name} autocast": (name, "autocast", "bert_fast") for name in CLASSES[1:]},
    }
    if importlib.util.find_spec("transformers") is not None:
        wanted["fused BertForSequenceClassification autocast"] = ("BertForSequenceClassification", "autocast", "fused")
    return {
        step: _layer(precision, driver) if kind == "layer" else count(make_step(name, precision, kind=kind), driver)
        for step, (name, precision, kind) in wanted.items()
        if only in step
    }


def _layer(precision: str, driver: NullDriver) -> dict[str, Any]:
    """What the second layer of a model adds, forward and backward."""
    one, two = (count(make_step("BertModel", precision, num_layers=layers), driver) for layers in (1, 2))
    return {part: _difference(two[part], one[part]) for part in PARTS if part != "optimize"}


def _difference(more: dict[str, Any], less: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: n for key in value if (n := value[key] - less[name].get(key, 0))}
        if isinstance(value, dict)
        else value - less[name]
        for name, value in more.items()
    }


def _flat(numbers: dict[str, Any]) -> dict[str, int]:
    """The numbers of a part as they are compared: small launches all together."""
    flat = {name: value for name, value in numbers.items() if not isinstance(value, dict)}
    small = numbers["small"]
    return numbers["launches"] | flat | {"small": sum(small.values()) if isinstance(small, dict) else small}


def risen(found: Table, recorded: Table) -> list[str]:
    """What is more than was written down, a line each; steps that nobody wrote down are all more."""
    return [
        f"{step}, {part}: {number} {name}, at most {known.get(name, 0)} written down"
        for step, parts in found.items()
        for part, numbers in parts.items()
        for known in [_flat(recorded[step][part]) if step in recorded else {}]
        for name, number in _flat(numbers).items()
        if number > known.get(name, 0)
    ]


def read() -> Table:
    """What was written down."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def write(table: Table) -> None:
    """Writes down what was found, small launches all together."""
    short = {
        step: {part: numbers | {"small": _flat(numbers)["small"]} for part, numbers in parts.items()}
        for step, parts in table.items()
    }
    RECORD.write_text(json.dumps(short, indent=1) + "\n", encoding="utf-8")


def rows(table: Table) -> list[tuple[str, str, int, int, int, int, int]]:
    """Step, part, launches, tensor maps, products, small launches, Python calls."""
    return [
        (step, part, sum(n["launches"].values()), n["tensor maps"], n["products"], _flat(n)["small"], n["python calls"])
        for step, parts in table.items()
        for part, n in parts.items()
    ]
