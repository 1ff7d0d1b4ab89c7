"""Counter-based dropout: masks by the C++ routines on the CPU, by tensor arithmetic elsewhere."""

import torch
from torch import Tensor

from bert_fast import native
from bert_fast.reference import dropout as reference
from bert_fast.torch._native import address, dropout_arguments


def dropout_fwd(x: Tensor, dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int) -> Tensor:
    """As `reference.dropout.dropout_fwd`."""
    lib = native.load() if x.device.type == "cpu" else None
    if dropout_p == 0.0 or lib is None or not x.numel():
        return reference.dropout_fwd(x, dropout_p, seed, coords, site)
    assert coords is not None
    coords = coords.contiguous()
    key, site, threshold, scale = dropout_arguments(dropout_p, seed, site)
    if x.dtype != torch.float32:
        keep = torch.empty(x.shape, dtype=torch.bool)
        arguments = (address(coords), key, site, threshold, torch.get_num_threads())
        lib.keep_mask(keep.data_ptr(), x.shape[0], x.shape[1], *arguments)
        return x * keep * scale
    if x.stride(-1) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    lib.dropout(
        y.data_ptr(), x.data_ptr(), x.shape[0], x.shape[1], x.stride(0),
        address(coords), key, site, threshold, scale, torch.get_num_threads(),
    )  # fmt: skip
    return y


def dropout_bwd(dy: Tensor, dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int) -> Tensor:
    """dx = dy * keep * scale: the same map as forward."""
    return dropout_fwd(dy, dropout_p, seed, coords, site)
