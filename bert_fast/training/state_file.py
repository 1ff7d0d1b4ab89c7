"""state.json of a checkpoint: how far the run was, and which files make up the checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

from bert_fast.data.digests import DIGESTS, check_seal, seal
from bert_fast.errors import CheckpointError
from bert_fast.training.loader import Position

__all__ = ["Progress", "RunState", "read_state", "write_state"]

_OUTCOMES = (None, "finished", "stopped early")


@dataclass
class Progress:
    """How far a run is.

    step: steps done. epoch, epoch_step: the next step's place in the data. best_step, best_value: of the evaluation
    with the best metric so far. since_best: evaluations after that.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    since_best: int = 0

    @property
    def position(self) -> Position:
        """The next step's place in the data."""
        return Position(self.epoch, self.epoch_step)

    def forget_best(self) -> None:
        """As if there had been no evaluation yet: the weights of the best one are lost."""
        self.best_step, self.best_value, self.since_best = None, None, 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Progress":
        """What `as_dict` gave.

        Raises:
            ValueError: something else; the message names the field.
        """
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise ValueError(f"{missing[0]}: is missing")
        for name in names:
            value = values[name]
            if name == "best_value":
                is_right = value is None or _is_number(value)
            else:  # no step is past the last one that was done, and there is at least one in an epoch
                is_right = _is_count(value, values["step"]) or (name == "best_step" and value is None)
            if not is_right:
                raise ValueError(f"{name}: got {value!r}")
        return cls(**{name: values[name] for name in names})


@dataclass(frozen=True)
class RunState:
    """What state.json says.

    Attributes:
        step: steps done.
        outcome: how the run ended; None: it had not.
        progress: see `Progress`.
        metrics: of the last evaluation.
        agreement: see `saved_state.agreement`.
        digests: of the other files by name; {} in checkpoints of versions that kept none.
    """

    step: int
    outcome: str | None
    progress: Progress
    metrics: dict[str, float]
    agreement: dict[str, Any]
    digests: dict[str, str]


def write_state(file: Path, state: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    """Writes the fields of a `RunState`, with a digest of them all."""
    file.write_text(json.dumps(seal({**state, DIGESTS: digests}), indent=1) + "\n", encoding="utf-8")


def read_state(file: Path) -> RunState:
    """What `write_state` wrote.

    Raises:
        CheckpointError: the file is missing or damaged; the message names it, and the field that is wrong.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        check_seal(content)
        return _checked(content)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read or is damaged: {error}") from None


def _checked(content: Mapping[str, Any]) -> RunState:
    progress: Any
    metrics: Any
    agreement: Any
    progress, metrics, agreement = (content.get(name) for name in ("progress", "metrics", "agreement"))
    step, outcome, digests = content.get("step"), content.get("outcome"), content.get(DIGESTS, {})
    for name, value in (("progress", progress), ("metrics", metrics), ("agreement", agreement), (DIGESTS, digests)):
        if not isinstance(value, dict):
            raise ValueError(f"{name}: expected an object, got {type(value).__name__}")
    if outcome not in _OUTCOMES:
        raise ValueError(f"outcome: expected one of {_OUTCOMES}, got {outcome!r}")
    for name, value in metrics.items():
        if not _is_number(value):
            raise ValueError(f"metrics: {name}: expected a number, got {type(value).__name__}")
    for name, value in digests.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not isinstance(value, str):
            raise ValueError(f"{DIGESTS}: expected files of the checkpoint and their digests, got {name!r}: {value!r}")
    how_far = Progress.from_dict(progress)
    if how_far.step != step or isinstance(step, bool):
        raise ValueError(f"step: expected {how_far.step}, as progress has it, got {step!r}")
    return RunState(step, outcome, how_far, metrics, agreement, digests)


def _is_count(value: Any, most: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and isinstance(most, int) and 0 <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
