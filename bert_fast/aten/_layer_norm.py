"""PyTorch's LayerNorm operator, such that an overflow shows in its output on the CPU."""

import torch
from torch import Tensor

__all__ = ["native_layer_norm"]


def native_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean [T], rstd [T]) of rows [T, H]; on the CPU all NaN in a row whose variance overflows.

    The operator gives NaN there or, with rstd = 1 / sqrt(inf) = 0, the bias: it depends on the length of the row. On
    other devices, where looking would be a device sync, what it gives stays.
    """
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    mean, rstd = mean.squeeze(-1), rstd.squeeze(-1)
    if rstd.is_cpu and not rstd.all():
        rstd = rstd.masked_fill(rstd == 0, torch.nan)
        y = y.masked_fill(rstd.isnan()[:, None], torch.nan)
    return y, mean, rstd
