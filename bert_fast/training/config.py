"""`TrainingConfig`: everything that decides how a run trains, apart from model and data."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bert_fast.files import path_name

__all__ = ["TrainingConfig"]

OPTIMIZERS = ("adamw", "lamb")
SCHEDULES = ("linear", "cosine", "polynomial", "constant")
PRECISIONS = ("fp32", "bf16", "fp16")
SHARDING = ("none", "fsdp2")


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
    sharding: str = "none"  # or "fsdp2": parameters and optimizer state shared among the processes

    log_every: int = 10  # steps
    eval_every: float | None = None  # steps; below 1: share of all; None: after every epoch
    save_every: float | None = None  # the same for checkpoints
    keep_checkpoints: int = 2  # newest; the best one is kept beside them
    early_stopping: int | None = None  # evaluations without a better metric

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_dir", Path(path_name("output_dir", self.output_dir)))
        if not isinstance(self.betas, tuple | list):
            raise TypeError(f"betas: expected two numbers, got {type(self.betas).__name__}")
        object.__setattr__(self, "betas", tuple(self.betas))
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"epochs, steps: expected one of them, got epochs={self.epochs}, steps={self.steps}")
        if self.batch_size is None and self.batch_tokens is None:
            raise ValueError("batch_size, batch_tokens: expected at least one of them, got neither")
        for name, allowed in (
            ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("precision", PRECISIONS), ("sharding", SHARDING),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("steps", "batch_size", "batch_tokens", "early_stopping"):
            _check_count(name, getattr(self, name), 1, optional=True)
        for name in ("gradient_accumulation", "eval_batch_tokens", "log_every", "keep_checkpoints"):
            _check_count(name, getattr(self, name), 1)
        for name in ("num_workers", "seed"):
            _check_count(name, getattr(self, name), 0)
        if self.seed >= 2**32:
            raise ValueError(f"seed: expected a number below {2**32}, got {self.seed}")
        for name in ("epochs", "eval_every", "save_every", "max_grad_norm", "learning_rate", "schedule_power"):
            _check_number(name, getattr(self, name), is_positive=True)
        for name in ("weight_decay", "warmup", "eps"):
            _check_number(name, getattr(self, name), is_positive=False)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON and YAML."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"output_dir": str(self.output_dir), "betas": list(self.betas)}


def _check_count(name: str, value: Any, least: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _check_number(name: str, value: Any, is_positive: bool) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not (value > 0 if is_positive else value >= 0) or value == float("inf"):
        raise ValueError(f"{name}: expected a number {'above' if is_positive else 'from'} 0, got {value}")
