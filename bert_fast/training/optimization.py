"""The optimizer of a run, and its learning rate as a function of the step."""

import math
from collections.abc import Callable

import torch
from torch import nn

from bert_fast.checks import check_choice, check_count, check_number
from bert_fast.optim import AdamW, make_lamb, weight_decay_groups
from bert_fast.training.config import TrainingConfig

__all__ = ["learning_rate_schedule", "make_optimizer", "warmup_steps"]

_DECAYS: dict[str, Callable[[float, float], float]] = {
    # share of the way after the warm-up that is done -> share of the learning rate
    "linear": lambda done, power: 1 - done,
    "cosine": lambda done, power: 0.5 * (1 + math.cos(math.pi * done)),
    "polynomial": lambda done, power: (1 - done) ** power,
    "constant": lambda done, power: 1.0,
}


def warmup_steps(warmup: float, num_steps: int) -> int:
    """Steps of warm-up: `warmup` itself, or where it is below 1 that share of all, rounded up."""
    warmup = check_number("warmup", warmup)
    num_steps = check_count("num_steps", num_steps, 1)
    return math.ceil(warmup * num_steps) if warmup < 1 else round(warmup)


def learning_rate_schedule(
    schedule: str, learning_rate: float, num_steps: int, warmup: float = 0.0, power: float = 1.0
) -> Callable[[int], float]:
    """The learning rate of step 0, 1, ..., num_steps - 1, as transformers' schedules of the same names give it.

    In the warm-up of w steps step i has i / w of it; after that what `schedule` says: "linear" and "cosine" fall to 0,
    "polynomial" as (1 - done) ** power (power 1 in Devlin et al., 0.5 in You et al. 2020 (arXiv:1904.00962)), and
    "constant" stays.

    Raises: TypeError, ValueError naming the argument.
    """
    check_choice("schedule", schedule, _DECAYS)
    learning_rate, power = check_number("learning_rate", learning_rate), check_number("power", power)
    ramp, decay = warmup_steps(warmup, num_steps), _DECAYS[schedule]

    def at(step: int) -> float:
        if step < ramp:
            return learning_rate * step / ramp
        done = (step - ramp) / max(1, num_steps - ramp)
        return learning_rate * decay(min(1.0, done), power)

    return at


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW or LAMB with weight decay on matrices only; clipping to config.max_grad_norm is part of their step.

    Sharded parameters are stepped as whole ones are: norms are those of all shards together.
    """
    groups = weight_decay_groups(model, config.weight_decay)
    make = AdamW if config.optimizer == "adamw" else make_lamb
    return make(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, max_grad_norm=config.max_grad_norm
    )  # fmt: skip
