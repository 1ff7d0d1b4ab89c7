"""Small models, and batches to train them on."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(13, 31), nn.GELU(), nn.LayerNorm(31), nn.Linear(31, 7))
    for p in layers.parameters():
        nn.init.normal_(p, std=0.3)
    return layers.to(dtype)


@pytest.fixture
def make_model() -> Callable[..., nn.Module]:
    """Makes the same model each time."""
    return _model


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for i in steps:
        torch.manual_seed(1000 + i)
        dtype = next(model.parameters()).dtype
        x, y = torch.randn(8, 13).to(dtype), torch.randn(8, 7).to(dtype)
        optimizer.zero_grad()
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def train() -> Callable[..., list[float]]:
    """Trains for the given steps, each with a batch of its own; the losses."""
    return _train


@pytest.fixture
def parameters() -> Callable[[nn.Module], list[Tensor]]:
    """Detached copies of a model's parameters."""
    return lambda model: [p.detach().clone() for p in model.parameters()]
