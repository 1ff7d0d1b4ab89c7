"""Stored results of tokenizers: the newest line of each case, and the peers that count."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.kit.results import read_lines
from benchmarks.tokenizers.contestants import PEERS

Line = dict[str, Any]


def newest_lines(path: Path) -> dict[str, Line]:
    """`newest` of one file; empty where it is not there."""
    return newest(read_lines(path)) if path.exists() else {}


def newest(lines: Iterable[Line]) -> dict[str, Line]:
    """Case name -> its last line of kind "tokenizer"."""
    return {line["case"]: line for line in lines if line.get("kind") == "tokenizer"}


def best_peer(line: Line) -> str | None:
    """The fastest peer whose ids are right: bert_fast is the fewest times as fast as it."""
    ratios = {
        name: entrant["ratio"]
        for name, entrant in line["entrants"].items()
        if name in PEERS and entrant["differ"] == 0 and "ratio" in entrant
    }
    return min(ratios, key=ratios.__getitem__, default=None)
