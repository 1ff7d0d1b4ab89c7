"""Rotary position embedding from PyTorch's operators, over memory that is there."""

import torch
from torch import Tensor

from bert_fast.reference.precision import wide
from bert_fast.reference.rotary import Rotary, turned_parts


def rotary_fwd(a: Rotary) -> Tensor:
    """y, as `reference.rotary`."""
    return _turned(a, a.qkv, False)


def rotary_bwd(a: Rotary, dy: Tensor) -> dict[str, Tensor]:
    """Gradients by name, as `reference.rotary`."""
    return {"qkv": _turned(a, dy, True)}


def rotary_in_place(a: Rotary, is_backward: bool) -> None:
    """As `reference.rotary`."""
    _turn(a, a.qkv, is_backward)


def _turned(a: Rotary, x: Tensor, is_backward: bool) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    _turn(a, y, is_backward)
    return y


def _turn(a: Rotary, x: Tensor, is_backward: bool) -> None:
    """Turns x in place."""
    given = x[:, : turned_parts(x.shape[1])]
    turned = wide(given)
    cos, sin = a.cos[:, None, None], a.sin[:, None, None]
    x1, x2 = turned.unflatten(-1, (-1, 2)).unbind(-1) if a.interleaved else turned.chunk(2, dim=-1)
    sign = -1.0 if is_backward else 1.0
    crossed = x1 * sin
    x1.mul_(cos).addcmul_(x2, sin, value=-sign)
    x2.mul_(cos).add_(crossed, alpha=sign)
    if turned is not given:
        given.copy_(turned)
