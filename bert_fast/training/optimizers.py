"""The optimizer of a run: this library's, but for sharded parameters PyTorch's."""

import torch
from torch import nn

from bert_fast.optim import AdamW, make_lamb, weight_decay_groups
from bert_fast.training.config import TrainingConfig

__all__ = ["make_optimizer"]


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW or LAMB with weight decay on matrices only; clipping to config.max_grad_norm is part of their step.

    Under "fsdp2" it is torch.optim.AdamW, which knows sharded tensors, and the caller clips.

    Raises: ValueError for LAMB on sharded parameters, whose norms it would need.
    """
    groups = weight_decay_groups(model, config.weight_decay)
    lr, betas, eps = config.learning_rate, config.betas, config.eps
    if config.sharding == "fsdp2":
        if config.optimizer != "adamw":
            raise ValueError(
                f"optimizer: expected 'adamw' with sharding 'fsdp2', got {config.optimizer!r}: LAMB needs norms of "
                "whole parameters, which no process holds; use sharding 'none'"
            )
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    if config.optimizer == "lamb":
        return make_lamb(groups, lr=lr, betas=betas, eps=eps, max_grad_norm=config.max_grad_norm)
    return AdamW(groups, lr=lr, betas=betas, eps=eps, max_grad_norm=config.max_grad_norm)
