"""Functions (layer, random numbers) that change a layer in place between two calls, and the layer's sizes."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

CONFIG = SimpleNamespace(
    hidden_size=32, intermediate_size=48, num_attention_heads=2, layer_norm_eps=1e-12, hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.2, hidden_act="gelu",
)  # fmt: skip


def weights(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer.parameters() if p.dim() == 2]


def moved(layer: nn.Module, rng: random.Random) -> None:
    p = rng.choice(weights(layer))
    p.data = p.data.clone()


def unaligned(layer: nn.Module, rng: random.Random) -> None:
    p = rng.choice(weights(layer))
    p.data = torch.empty(p.numel() + 1, dtype=p.dtype)[1:].view_as(p).copy_(p.data)


def transposed(layer: nn.Module, rng: random.Random) -> None:
    p = rng.choice(weights(layer))
    p.data = p.data.t().contiguous().t()


def rewritten(layer: nn.Module, rng: random.Random) -> None:
    with torch.no_grad():
        rng.choice(list(layer.parameters())).mul_(1.25)


def frozen(layer: nn.Module, rng: random.Random) -> None:
    p = rng.choice(list(layer.parameters()))
    p.requires_grad_(not p.requires_grad)


def replaced(layer: nn.Module, rng: random.Random) -> None:
    module = rng.choice([one for one in layer.modules() if isinstance(one, nn.Linear)])
    module.weight = nn.Parameter(module.weight.detach() * 0.5, module.weight.requires_grad)


def without_bias(layer: nn.Module, rng: random.Random) -> None:
    module = layer.get_submodule("attention.output.dense")
    module.bias = None if module.bias is not None else nn.Parameter(torch.full_like(module.weight[:, 0], 0.1))


def flipped(layer: nn.Module, rng: random.Random) -> None:
    layer.train(not layer.training)


def joined(layer: Any, rng: random.Random) -> None:
    layer.attention.self._separate_memory()
    layer.attention.self._join_memory()


CHANGES: tuple[Callable[[Any, random.Random], None], ...] = (
    moved, unaligned, transposed, rewritten, frozen, replaced, without_bias, flipped, joined,
)  # fmt: skip
MOVES = moved, unaligned, transposed  # values stay
