"""Checkpoints as transformers writes them: which one a run goes on from, and whether it is of this run."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bert_fast.data.batches import Source
from bert_fast.data.digests import data_digest
from bert_fast.errors import CheckpointError
from bert_fast.training.loading import Features

STATE = "trainer_state.json"
RUN = "bert_fast run"  # the entry of the state that says which run a checkpoint is of
_SAMPLE = 100  # examples that stand for all


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of a run that was written to its end; None where there is none.

    transformers writes a checkpoint's state last: one that a killed run left unfinished has none that can be read.

    Args:
        folder: output_dir of the run.

    Returns:
        The checkpoint's folder.

    Example:
        >>> training.last_checkpoint("no-such-run") is None
        True
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    steps = sorted(
        (int(found[1]) for name in names if (found := re.fullmatch(r"checkpoint-(\d+)", name))), reverse=True
    )
    paths = (os.path.join(folder, f"checkpoint-{step}") for step in steps)
    return next((path for path in paths if _state(Path(path)) is not None), None)


def check_checkpoint(folder: Path, run: Mapping[str, Any], is_sharded: bool) -> None:
    """Sees that a checkpoint is whole and of this run: transformers would go on without a word.

    run: what decides a run's bits, by name, as JSON holds it; a checkpoint of another program has none.

    Raises: CheckpointError: with the part that is missing, or what differs.
    """
    for pattern in ("scheduler.pt", "rng_state*.pth", *(() if is_sharded else ("optimizer.pt",))):
        if not any(folder.glob(pattern)):
            raise CheckpointError(f"{folder}: expected a whole checkpoint, got none of {pattern}")
    found = ((_state(folder) or {}).get("stateful_callbacks") or {}).get(RUN) or {}
    for name, value in run.items():
        if name in found and found[name] != value:
            raise CheckpointError(
                f"{folder}: is of another run: {name}: {found[name]!r} there and {value!r} here; use another output_dir"
            )


def examples_digest(source: Source) -> str:
    """What tells examples from others: made of the lengths of all, and of 100 of them, evenly distributed.

    Of `Features`, whose collator may draw random numbers, of the lengths alone.
    """
    lengths = source.lengths(0)
    if isinstance(source, Features) or not len(lengths):
        return data_digest(lengths)
    indices = np.unique(np.linspace(0, len(lengths) - 1, min(len(lengths), _SAMPLE)).astype(np.int64))
    batch = source.batch(0, indices)
    return data_digest(lengths, *(value.numpy() for value in batch.values() if isinstance(value, Tensor)))


def _state(folder: Path) -> Any:
    """What the state of a checkpoint says; None where it is not there, or broken off."""
    try:
        with open(folder / STATE, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None
