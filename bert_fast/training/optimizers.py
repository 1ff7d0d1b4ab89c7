"""The optimizer of a run."""

import torch
from torch import nn

from bert_fast.optim import AdamW, make_lamb, weight_decay_groups
from bert_fast.training.config import TrainingConfig

__all__ = ["make_optimizer"]


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW or LAMB with weight decay on matrices only; clipping to config.max_grad_norm is part of their step.

    Sharded parameters are stepped as whole ones are: norms are those of all shards together.
    """
    groups = weight_decay_groups(model, config.weight_decay)
    make = AdamW if config.optimizer == "adamw" else make_lamb
    return make(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, max_grad_norm=config.max_grad_norm
    )  # fmt: skip
