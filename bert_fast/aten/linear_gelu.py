"""gelu(x W^T + b) with the pre-activation saved: one library GEMM, one GELU; backward: two GEMMs."""

import torch
from torch import Tensor

from bert_fast.aten.linear import linear_bwd, linear_fwd

__all__ = ["linear_gelu_bwd", "linear_gelu_fwd"]


def linear_gelu_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    """(y, pre), as `reference.linear_gelu`."""
    pre = linear_fwd(x, weight, bias)
    return torch.nn.functional.gelu(pre, approximate=approximate), pre


def linear_gelu_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, pre: Tensor, approximate: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), as `reference.linear_gelu`."""
    return linear_bwd(torch.ops.aten.gelu_backward(dy, pre, approximate=approximate), x, weight)
