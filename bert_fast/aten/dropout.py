"""Counter-based dropout on the CPU through the C++ routine, elsewhere through tensor arithmetic."""

import torch
from torch import Tensor

from bert_fast.aten._native import address, dropout_arguments, routines
from bert_fast.reference import dropout as reference

__all__ = ["dropout_bwd", "dropout_fwd"]


def dropout_fwd(x: Tensor, dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int) -> Tensor:
    """As `reference.dropout.dropout_fwd`."""
    lib = routines(x)
    if dropout_p == 0.0 or lib is None:
        return reference.dropout_fwd(x, dropout_p, seed, coords, site)
    if x.stride(-1) != 1:
        x = x.contiguous()
    assert coords is not None
    coords = coords.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    key, site, threshold, scale = dropout_arguments(dropout_p, seed, site)
    lib.dropout(
        y.data_ptr(), x.data_ptr(), x.shape[0], x.shape[1], x.stride(0),
        address(coords), key, site, threshold, scale, torch.get_num_threads(),
    )  # fmt: skip
    return y


def dropout_bwd(dy: Tensor, dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int) -> Tensor:
    """dx = dy * keep * scale: the same map as forward."""
    return dropout_fwd(dy, dropout_p, seed, coords, site)
