"""Several parameters as one matrix without copying them: neighbours in one storage.

`query`, `key` and `value` stay three parameters with names, gradients and optimizers' states of their own; a matrix
product over the three needs no more than that they lie side by side in memory. Where they do not, `one_tensor` copies:
results never depend on it. `docs/decisions/0010-qkv-storage.md` says what moves parameters apart.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["are_neighbours", "join_storage", "one_tensor"]

_ALIGNMENT = 16  # bytes; the widest load of a GPU's thread
_PLAIN = (Tensor, nn.Parameter)


def one_tensor(*tensors: Tensor) -> Tensor:
    """The tensors [N_i, ...], one below the other, as one [sum of N_i, ...] of their dtype.

    A view where they are neighbours and no gradient is to be recorded, else a copy by `torch.cat`: of subclasses
    (DTensor, fake and functional tensors) and within a graph that is being traced always the copy.
    """
    if not are_neighbours(*tensors) or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return torch.cat(tensors)
    first = tensors[0]
    whole = first.as_strided((sum(t.numel() for t in tensors),), (1,))  # from where the first begins
    return whole.view(sum(len(t) for t in tensors), *first.shape[1:])


def are_neighbours(*tensors: Tensor) -> bool:
    """Whether the tensors follow one another in one storage, each contiguous, so that `one_tensor` copies nothing."""
    if torch.compiler.is_compiling() or not _fit_together(tensors):
        return False
    first = tensors[0]
    place, end = _place(first), first.storage_offset()
    for t in tensors:
        if t.storage_offset() != end or _place(t) != place:
            return False
        end += t.numel()
    return True


def join_storage(*parameters: nn.Parameter | None) -> None:
    """Makes parameters [N_i, ...] neighbours: their values move to one fresh storage, in this order.

    The Parameter objects stay, and with them names, `requires_grad`, `.grad`, hooks and what optimizers keep of them;
    views of the old memory that someone holds no longer see them, as after `.to()`. Nothing happens where they are
    neighbours already, and where one storage would be wrong or of no use:

    - one is None, a subclass (DTensor, quantised, fake) or on the meta device;
    - two are one and the same, or overlap in memory (tied);
    - shapes beyond the first dimension, dtypes or devices differ, or one is not contiguous;
    - the memory is shared with other processes, which would keep the old one;
    - a piece would not begin at a multiple of 16 bytes, which kernels that read it alone want.
    """
    plain = [p for p in parameters if type(p) is nn.Parameter]
    if len(plain) < len(parameters) or not _can_move(plain) or are_neighbours(*plain):
        return
    joined = torch.cat([p.detach() for p in plain])
    for parameter, piece in zip(plain, joined.split([len(p) for p in plain]), strict=True):
        parameter.data = piece


def _fit_together(tensors: Sequence[Tensor]) -> bool:
    """Whether all are plain tensors with memory, contiguous, alike in dtype, device and all sizes but the first."""
    first = tensors[0]
    return all(
        type(t) in _PLAIN
        and t.is_contiguous()
        and t.dtype is first.dtype
        and t.device == first.device
        and t.shape[1:] == first.shape[1:]
        and t.dim() > 0
        and not t.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        for t in tensors
    )


def _place(t: Tensor) -> tuple[int, int]:
    """What is equal for two tensors of one storage, and of no others while both live."""
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _can_move(parameters: Sequence[nn.Parameter]) -> bool:
    if not _fit_together(parameters):
        return False
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in parameters)
    is_tied = any(begin < end for (_, end), (begin, _) in itertools.pairwise(spans))
    is_shared = any(p.device.type == "cpu" and p.is_shared() for p in parameters)
    is_aligned = all(p.nbytes % _ALIGNMENT == 0 for p in parameters[:-1])
    return is_aligned and not is_tied and not is_shared
