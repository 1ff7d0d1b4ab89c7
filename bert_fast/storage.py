"""Several parameters as one matrix without copying them: neighbours in memory, each with a storage of its own.

`query`, `key` and `value` stay three parameters with names, gradients and optimizers' states of their own; a matrix
product over the three needs no more than that they lie side by side in memory. Each is a piece of one block, handed out
by way of DLPack: its storage begins and ends with itself, so that whatever looks for shared tensors by their storages
(safetensors, accelerate, hubs) finds none. The block lives as long as a piece does. Where parameters are no neighbours,
`one_tensor` copies: results never depend on it. `docs/decisions/0010-qkv-storage.md` says what moves them apart.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active as _is_transformed  # tensors may be wrapped, without a storage
from torch.utils.dlpack import from_dlpack

_ALIGNMENT = 16  # bytes; the widest load of a GPU's thread
_PLAIN = (Tensor, nn.Parameter)
_DEVICES = {"cpu", "cuda"}  # whose memory DLPack hands out as it is
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# The name under which the storage of a piece keeps its block. An attribute of the storage and not of the parameter or
# the module: a copy, a pickle or `.to()` makes another storage, which is a piece of nothing.
_BLOCK = "_bert_fast_block"


def one_tensor(*tensors: Tensor) -> Tensor:
    """The tensors [N_i, ...], one below the other, as one [sum of N_i, ...]: `view_of_neighbours`, else a copy."""
    view = view_of_neighbours(*tensors)
    return torch.cat(tensors) if view is None else view


def view_of_neighbours(*tensors: Tensor) -> Tensor | None:
    """The tensors [N_i, ...] as one [sum of N_i, ...] without a copy, to be read; None where that cannot be.

    It can where `join_memory` made them neighbours, in this order. Never of subclasses (DTensor, fake and functional
    tensors), within a graph that is being traced, or where a gradient is to be recorded. Autograd does not know that
    the view changes when they do: it is for the time of a product, not for keeping.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    return _view(tensors)


def are_neighbours(*tensors: Tensor) -> bool:
    """Whether the tensors [N_i, ...] follow one another in memory, as `join_memory` laid them."""
    return _view(tensors) is not None


def join_memory(*parameters: nn.Parameter | None) -> None:
    """Makes parameters [N_i, ...] neighbours: their values move to one fresh block of memory, in this order.

    The Parameter objects stay, and with them names, `requires_grad`, `.grad`, hooks and what optimizers keep of them;
    views of the old memory that someone holds no longer see them, as after `.to()`. Nothing happens where they are
    neighbours already, and where one block would be wrong or of no use:

    - one is None, a subclass (DTensor, quantised, fake), neither on the CPU nor on a GPU, or no floating-point number;
    - two are one and the same, or overlap in memory (tied);
    - shapes beyond the first dimension, dtypes or devices differ, or one is empty or not contiguous;
    - the memory is shared with other processes, which would keep the old one;
    - a piece would not begin at a multiple of 16 bytes, which kernels that read it alone want.
    """
    plain = [p for p in parameters if type(p) is nn.Parameter]
    if len(plain) < len(parameters) or not _fit_together(plain) or are_neighbours(*plain):
        return
    for parameter in plain:
        _forget_block(parameter)  # some were moved since
    if not _can_move(plain):
        return
    with torch.inference_mode(plain[0].is_inference()):  # not as the caller is: they may be trained later
        block = torch.cat([p.detach() for p in plain])
        for parameter, piece in zip(plain, block.split([len(p) for p in plain]), strict=True):
            parameter.data = from_dlpack(piece)
            setattr(parameter.untyped_storage(), _BLOCK, block)


def separate_memory(*parameters: nn.Parameter | None) -> None:
    """Undoes `join_memory`: parameters that are pieces of a block move to ordinary memory, each on its own."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter and _forget_block(parameter):
            with torch.inference_mode(parameter.is_inference()):
                parameter.data = parameter.detach().clone()


def _view(tensors: Sequence[Tensor]) -> Tensor | None:
    if torch.compiler.is_compiling() or _is_transformed() or type(tensors[0]) not in _PLAIN:
        return None
    block = getattr(tensors[0].untyped_storage(), _BLOCK, None)
    if block is None:
        return None
    dtype, sizes = block.dtype, block.shape[1:]
    start = end = tensors[0].data_ptr()
    rows = 0
    for t in tensors:
        if type(t) not in _PLAIN or t.data_ptr() != end or t.dtype is not dtype or not t.is_contiguous():
            return None
        shape = t.shape
        if not shape or shape[1:] != sizes:
            return None
        end += t.nbytes
        rows += shape[0]
    # A storage may have been given other memory since (`share_memory`); what lies within the block is the block's.
    skipped = start - block.data_ptr()
    if skipped < 0 or skipped + end - start > block.nbytes or not rows:
        return None
    return block if rows == block.shape[0] else block.narrow(0, skipped * rows // (end - start), rows)


def _forget_block(parameter: nn.Parameter) -> bool:
    """Whether the parameter was a piece of a block; its storage no longer knows."""
    storage = parameter.untyped_storage()
    block = getattr(storage, _BLOCK, None)
    if block is None:
        return False
    delattr(storage, _BLOCK)
    return 0 <= storage.data_ptr() - block.data_ptr() < block.nbytes  # not where it was given other memory since


def _fit_together(tensors: Sequence[Tensor]) -> bool:
    """Whether all are plain tensors, contiguous, not empty, alike in dtype, device and all sizes but the first."""
    if _is_transformed():
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
    if parameters[0].device.type not in _DEVICES or parameters[0].dtype not in _DTYPES:
        return False
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in parameters)
    is_tied = any(begin < end for (_, end), (begin, _) in itertools.pairwise(spans))
    is_shared = any(p.device.type == "cpu" and p.is_shared() for p in parameters)
    is_aligned = all(p.nbytes % _ALIGNMENT == 0 for p in parameters[:-1])
    return is_aligned and not is_tied and not is_shared
