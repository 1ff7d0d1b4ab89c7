"""Rotary position embedding: every pair of a head's numbers is turned by an angle of the token's position.

    y1 = x1 cos - x2 sin
    y2 = x2 cos + x1 sin

Pairs (x1, x2) are x[..., i] and x[..., i + D / 2] (halves: NomicBERT, GTE, Jina), or x[..., 2 i] and x[..., 2 i + 1]
(interleaved: RoFormer), with cos and sin of column i. A turn has no other derivative than itself, so

    dx1 = dy1 cos + dy2 sin
    dx2 = dy2 cos - dy1 sin

is the turn by the negative angle: backward reads cos and sin alone. Source: Su et al. 2021 (arXiv:2104.09864), section
3.4.2.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.precision import wide


class Rotary(NamedTuple):
    """The arguments; F = D / 2. The first two of P parts (query and key, or all heads as one) are turned."""

    qkv: Annotated[Tensor, "x T P A 2F"]
    cos: Annotated[Tensor, "s T F"]
    sin: Annotated[Tensor, "s T F"]
    interleaved: bool  # which numbers are pairs


def turned_parts(num_parts: int) -> int:
    """How many of the parts are turned: query and key of three, else all."""
    return min(num_parts, 2)


def rotary_fwd(a: Rotary) -> Tensor:
    """y (Tensor [T, P, A, 2F], dtype of qkv), contiguous."""
    return _turned(a.qkv, a.cos, a.sin, a.interleaved)


def rotary_bwd(a: Rotary, dy: Tensor) -> dict[str, Tensor]:
    """Gradients by name. dy (Tensor [T, P, A, 2F], dtype of qkv); a.qkv is not read."""
    return {"qkv": _turned(dy, a.cos, -a.sin, a.interleaved)}


def rotary_in_place(a: Rotary, is_backward: bool) -> None:
    """Writes y over a.qkv; backward: the gradient over the upstream one, which a.qkv then is."""
    a.qkv.copy_(_turned(a.qkv, a.cos, -a.sin if is_backward else a.sin, a.interleaved))


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin = cos[:, None, None], sin[:, None, None]  # of all parts and heads
    turned, rest = wide(x).tensor_split([turned_parts(x.shape[1])], dim=1)
    if interleaved:
        x1, x2 = turned.unflatten(-1, (-1, 2)).unbind(-1)
        y = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)
    else:
        x1, x2 = turned.chunk(2, dim=-1)
        y = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
    return torch.cat((y, rest), 1).to(x.dtype)
