"""Which parameters decay."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from bert_fast.checks import check_number


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: matrices with `weight_decay`; biases and LayerNorm weights without.

    In BERT those are exactly the parameters of two and of one dimension. Parameters that need no gradient are left out;
    tied ones appear once. A group without parameters is left out, too.

    Args:
        model: the module whose parameters are grouped.
        weight_decay: of the matrices.

    Returns:
        Groups (list of dict), as optimizers take them.

    Example:
        >>> groups = optim.weight_decay_groups(torch.nn.Linear(4, 2), 0.01)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.01), (1, 0.0)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a Module, got {type(model).__name__}")
    check_number("weight_decay", weight_decay)
    params = [p for p in model.parameters() if p.requires_grad]
    groups: Iterable[dict[str, Any]] = (
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]
