"""Several parameters as one matrix without copying them: neighbours in one storage.

`query`, `key` and `value` stay three parameters with names, gradients and optimizers' states of their own; a matrix
product over the three needs no more than that they lie side by side in memory. Where they do not, `one_tensor` copies:
results never depend on it. `docs/decisions/0010-qkv-storage.md` says what moves parameters apart.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["are_neighbours", "join_storage", "one_tensor", "view_of_neighbours"]

_ALIGNMENT = 16  # bytes; the widest load of a GPU's thread
_PLAIN = (Tensor, nn.Parameter)


def one_tensor(*tensors: Tensor) -> Tensor:
    """The tensors [N_i, ...], one below the other, as one [sum of N_i, ...]: `view_of_neighbours`, else a copy."""
    view = view_of_neighbours(*tensors)
    return torch.cat(tensors) if view is None else view


def view_of_neighbours(*tensors: Tensor) -> Tensor | None:
    """The tensors [N_i, ...] as one [sum of N_i, ...] without a copy; None where that cannot be.

    It can where they follow one another in one storage, each contiguous. Never of subclasses (DTensor, fake and
    functional tensors), within a graph that is being traced, or where a gradient is to be recorded.
    """
    if not are_neighbours(*tensors):
        return None
    rows, records = 0, torch.is_grad_enabled()
    for t in tensors:
        if records and t.requires_grad:
            return None
        rows += t.shape[0]
    first = tensors[0]
    sizes = first.shape[1:]
    # Not the first one's own strides, which may be anything along dimensions of size 1.
    strides = (*sizes, 1) if len(sizes) < 2 else [math.prod(sizes[dim:]) for dim in range(len(sizes) + 1)]
    return first.as_strided((rows, *sizes), strides)


def are_neighbours(*tensors: Tensor) -> bool:
    """Whether the tensors [N_i, ...] follow one another in one storage, each contiguous."""
    if torch.compiler.is_compiling() or not _fit_together(tensors):
        return False
    first = tensors[0]
    storage, end = first.untyped_storage(), first.data_ptr()
    for t in tensors:
        if t.data_ptr() != end:
            return False
        end += t.nbytes
    # What follows the first one in its own storage is memory of no other.
    return end <= storage.data_ptr() + storage.nbytes()


def join_storage(*parameters: nn.Parameter | None) -> None:
    """Makes parameters [N_i, ...] neighbours: their values move to one fresh storage, in this order.

    The Parameter objects stay, and with them names, `requires_grad`, `.grad`, hooks and what optimizers keep of them;
    views of the old memory that someone holds no longer see them, as after `.to()`. Nothing happens where they are
    neighbours already, and where one storage would be wrong or of no use:

    - one is None, a subclass (DTensor, quantised, fake) or on the meta device;
    - two are one and the same, or overlap in memory (tied);
    - shapes beyond the first dimension, dtypes or devices differ, or one is empty or not contiguous;
    - the memory is shared with other processes, which would keep the old one;
    - a piece would not begin at a multiple of 16 bytes, which kernels that read it alone want.
    """
    plain = [p for p in parameters if type(p) is nn.Parameter]
    if len(plain) < len(parameters) or not _can_move(plain) or are_neighbours(*plain):
        return
    with torch.inference_mode(plain[0].is_inference()):  # not as the caller is: they may be trained later
        joined = torch.cat([p.detach() for p in plain])
        for parameter, piece in zip(plain, joined.split([len(p) for p in plain]), strict=True):
            parameter.data = piece


def _fit_together(tensors: Sequence[Tensor]) -> bool:
    """Whether all are plain tensors, contiguous, not empty, alike in dtype, device and all sizes but the first."""
    if torch._C._are_functorch_transforms_active():  # tensors may be wrapped, and then have no storage
        return False
    first = tensors[0]
    dtype, device, sizes = first.dtype, first.device, first.shape[1:]
    for t in tensors:
        if type(t) not in _PLAIN or t.dtype is not dtype or t.device != device or not t.is_contiguous():
            return False
        if t.dim() == 0 or t.shape[1:] != sizes or t.numel() == 0:
            return False
    return True


def _can_move(parameters: Sequence[nn.Parameter]) -> bool:
    if not _fit_together(parameters) or parameters[0].is_meta:
        return False
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in parameters)
    is_tied = any(begin < end for (_, end), (begin, _) in itertools.pairwise(spans))
    is_shared = any(p.device.type == "cpu" and p.is_shared() for p in parameters)
    is_aligned = all(p.nbytes % _ALIGNMENT == 0 for p in parameters[:-1])
    return is_aligned and not is_tied and not is_shared
