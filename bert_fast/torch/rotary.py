"""Rotary position embedding: of fp32 on the CPU one pass by the C++ routine, else PyTorch's operators.

Those take five passes over halves of the heads, and a temporary tensor of half their size.
"""

import torch
from torch import Tensor

from bert_fast.reference.precision import wide
from bert_fast.reference.rotary import Rotary, turned_parts
from bert_fast.torch._native import routines


def rotary_fwd(a: Rotary) -> Tensor:
    """y, as `reference.rotary`."""
    return _turned(a, a.qkv, False)


def rotary_bwd(a: Rotary, dy: Tensor) -> dict[str, Tensor]:
    """Gradients by name, as `reference.rotary`."""
    return {"qkv": _turned(a, dy, True)}


def rotary_in_place(a: Rotary, is_backward: bool) -> None:
    """As `reference.rotary`."""
    turned = a.qkv[:, : turned_parts(a.qkv.shape[1])]
    if turned.stride(3) != 1:
        turned.copy_(_turned(a, turned, is_backward))
    elif not _by_routine(a, turned, turned, is_backward):
        _turn(a, turned, is_backward)


def _turned(a: Rotary, x: Tensor, is_backward: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x if x.stride(3) == 1 else x.contiguous()
    if not _by_routine(a, x, y, is_backward):
        y.copy_(x)
        _turn(a, y[:, : turned_parts(x.shape[1])], is_backward)
    return y


def _by_routine(a: Rotary, x: Tensor, y: Tensor, is_backward: bool) -> bool:
    """Turns x [T, P, A, D] into y in one pass, if there is a routine for it."""
    lib = routines(x, a.cos, a.sin)
    if lib is None:
        return False
    num_tokens, num_parts, num_heads, head_dim = x.shape
    cos, sin = a.cos.contiguous(), a.sin.contiguous()
    strides = (*x.stride()[:3], *y.stride()[:3])
    lib.rotary(
        x.data_ptr(), y.data_ptr(), cos.data_ptr(), sin.data_ptr(), num_tokens, num_parts, num_heads, head_dim // 2,
        turned_parts(num_parts), strides, a.interleaved, is_backward,
        torch.get_num_threads(),
    )  # fmt: skip
    return True


def _turn(a: Rotary, given: Tensor, is_backward: bool) -> None:
    """Turns [T, P, A, D] in place, every part."""
    turned = wide(given)
    cos, sin = a.cos[:, None, None], (-a.sin if is_backward else a.sin)[:, None, None]
    x1, x2 = turned.unflatten(-1, (-1, 2)).unbind(-1) if a.interleaved else turned.chunk(2, dim=-1)
    crossed = x1 * sin
    x1.mul_(cos).addcmul_(x2, sin, value=-1.0)
    x2.mul_(cos).add_(crossed)
    if turned is not given:
        given.copy_(turned)
