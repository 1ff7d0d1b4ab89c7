"""What a model says about examples, row by row: dictionaries, and tables for spreadsheets."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["probabilities", "write_rows"]

_BREAKS = str.maketrans("\t\n\r", "   ")  # tables have no quoting


def probabilities(logits: np.ndarray) -> np.ndarray:
    """The softmax over the last dimension, in fp64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a TSV file with a header: the keys of the first row, which all rows have.

    Numbers that are not whole have six digits; tabs and line ends within texts become spaces.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for number, row in enumerate(rows):
            if number == 0:
                file.write("\t".join(_cell(name) for name in row) + "\n")
            file.write("\t".join(_cell(value) for value in row.values()) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value).translate(_BREAKS)
