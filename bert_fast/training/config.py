"""`TrainingConfig`: everything that decides how a run trains, apart from model and data."""

import math
import reprlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bert_fast.checks import check_choice, check_count, check_flag, check_number
from bert_fast.files import path_name

__all__ = ["SettingsError", "TrainingConfig"]

OPTIMIZERS = ("adamw", "lamb")
SCHEDULES = ("linear", "cosine", "polynomial", "constant")
PRECISIONS = ("fp32", "bf16", "fp16")
SHARDING = ("none", "fsdp2")
_MOST_EPOCHS = 2**31  # so that steps can be counted
_EXACT = 2.0**53  # greater whole numbers are no exact floats


class SettingsError(ValueError):
    """A setting is unknown, missing or of a wrong value; the message names it, and the file it is in."""


@dataclass(frozen=True)
class TrainingConfig:
    """How a run trains; the field's usual defaults for BERT.

    Raises: TypeError, ValueError naming the field, what was expected and what came.
    """

    output_dir: Path
    epochs: float | None = None  # as long as the first one; either epochs or steps
    steps: int | None = None  # of the optimizer

    # Batches. Per process: a step takes gradient_accumulation * processes of them.
    batch_size: int | None = 32  # examples
    batch_tokens: int | None = None  # a budget of tokens, filled by packing; with batch_size both are limits
    gradient_accumulation: int = 1  # batches whose gradients are added up before a step
    eval_batch_tokens: int = 16384  # tokens of a batch where nothing is learned
    num_workers: int = 0  # processes that make batches; 0: one thread beside the training
    seed: int = 0  # of order, masking and dropout

    optimizer: str = "adamw"  # or "lamb"
    learning_rate: float = 5e-5  # the highest
    weight_decay: float = 0.01  # of matrices; biases and LayerNorm weights do not decay
    betas: tuple[float, float] = (0.9, 0.999)  # of the moving averages of gradients and their squares
    eps: float = 1e-8  # added to the denominator of the optimizer
    max_grad_norm: float | None = 1.0  # gradients are clipped to this norm, taken over all parameters; None: not
    schedule: str = "linear"  # "linear", "cosine", "polynomial" or "constant", after the warm-up
    warmup: float = 0.0  # steps; below 1: share of all steps
    schedule_power: float = 1.0  # of "polynomial"

    precision: str = "fp32"  # or "bf16", "fp16": of activations, by autocast; parameters stay fp32
    gradient_checkpointing: bool = False  # layers run again in backward: less memory, a third more work
    graphs: bool = False  # forward and backward are replayed as CUDA graphs
    sharding: str = "none"  # or "fsdp2": parameters and optimizer state shared among the processes

    log_every: int = 10  # steps
    eval_every: float | None = None  # steps; below 1: share of all; None: after every epoch
    save_every: float | None = None  # the same for checkpoints
    keep_checkpoints: int = 2  # newest; the best one is kept beside them; 0: that one alone
    best_by: str | None = None  # metric that chooses the best checkpoint; None: the task's
    early_stopping: int | None = None  # evaluations without a better metric; of no effect without valid

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_dir", Path(path_name("output_dir", self.output_dir)))
        object.__setattr__(self, "betas", _checked_betas(self.betas))
        if (self.epochs is None) == (self.steps is None):
            epochs, steps = reprlib.repr(self.epochs), reprlib.repr(self.steps)
            raise ValueError(f"epochs, steps: expected one of them, got epochs={epochs}, steps={steps}")
        if self.batch_size is None and self.batch_tokens is None:
            raise ValueError("batch_size, batch_tokens: expected at least one of them, got neither")
        for name, allowed in (
            ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("precision", PRECISIONS), ("sharding", SHARDING),
        ):  # fmt: skip
            check_choice(name, getattr(self, name), allowed)
        if not isinstance(self.best_by, str | None):
            raise TypeError(f"best_by: expected text or None, got {type(self.best_by).__name__}")
        for name in ("gradient_checkpointing", "graphs"):
            check_flag(name, getattr(self, name))
        for name, value in (("precision", "fp16"), ("sharding", "fsdp2"), ("gradient_checkpointing", True)):
            if self.graphs and getattr(self, name) == value:
                raise ValueError(f"graphs: expected False with {name}={value!r}, got True")
        for name in ("steps", "batch_size", "batch_tokens", "early_stopping"):
            self._read_count(name, 1, is_optional=True)
        for name in ("gradient_accumulation", "eval_batch_tokens", "log_every"):
            self._read_count(name, 1)
        for name in ("keep_checkpoints", "num_workers", "seed"):
            self._read_count(name, 0)
        if self.seed >= 2**32:
            raise ValueError(f"seed: expected a number below {2**32}, got {self.seed}")
        for name in ("epochs", "eval_every", "save_every", "max_grad_norm"):
            self._read_number(name, is_positive=True, is_optional=True)
        if self.epochs is not None and self.epochs > _MOST_EPOCHS:
            raise ValueError(f"epochs: expected at most {_MOST_EPOCHS}, got {self.epochs}")
        for name in ("learning_rate", "schedule_power"):
            self._read_number(name, is_positive=True)
        for name in ("weight_decay", "warmup", "eps"):
            self._read_number(name, is_positive=False)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON and YAML."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"output_dir": str(self.output_dir), "betas": list(self.betas)}

    def _read_count(self, name: str, least: int, is_optional: bool = False) -> None:
        value = getattr(self, name)
        if value is not None or not is_optional:
            object.__setattr__(self, name, check_count(name, value, least))

    def _read_number(self, name: str, is_positive: bool, is_optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and is_optional:
            return
        number = float(value) if isinstance(value, float) else check_number(name, value)
        if not (number > 0 if is_positive else number >= 0) or number == math.inf:
            raise ValueError(f"{name}: expected a number {'above' if is_positive else 'from'} 0, got {value}")
        if not isinstance(value, int) or number >= _EXACT:  # whole numbers stay what they are in the run's record
            object.__setattr__(self, name, number)


def _checked_betas(betas: Any) -> tuple[float, float]:
    if not isinstance(betas, tuple | list):
        raise TypeError(f"betas: expected two numbers, got {type(betas).__name__}")
    if len(betas) != 2:
        raise ValueError(f"betas: expected two numbers, got {len(betas)}")
    first, second = (check_number(f"betas[{index}]", beta) for index, beta in enumerate(betas))
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError(f"betas: expected numbers in [0, 1), got {first}, {second}")
    return first, second
