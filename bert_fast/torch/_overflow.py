"""Rows whose variance overflows, in the outputs of PyTorch's LayerNorm operator on the CPU."""

import torch
from torch import Tensor


def with_overflows(y: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """y [T, H] and rstd [T], both NaN in rows where rstd is 0: to be called where `not rstd.all()`, on the CPU only.

    The operator gives NaN there or, with rstd = 1 / sqrt(inf) = 0, the bias: it depends on the length of the row. On
    other devices, where looking would be a device sync, what it gives stays.
    """
    overflows = rstd == 0
    return y.masked_fill(overflows[:, None], torch.nan), rstd.masked_fill(overflows, torch.nan)
