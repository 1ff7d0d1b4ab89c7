"""q, k, v = x W^T + b, three library GEMMs; dx accumulates inside the GEMMs instead of by separate additions."""

import torch
from torch import Tensor

__all__ = ["qkv_projection_bwd", "qkv_projection_fwd"]


def qkv_projection_fwd(
    x: Tensor, wq: Tensor, bq: Tensor, wk: Tensor, bk: Tensor, wv: Tensor, bv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), each [T, A * D], as `reference.qkv_projection`."""
    linear = torch.nn.functional.linear
    return linear(x, wq, bq), linear(x, wk, bk), linear(x, wv, bv)


def qkv_projection_bwd(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dwq, dbq, dwk, dbk, dwv, dbv), as `reference.qkv_projection`."""
    dx = dq @ wq
    dx.addmm_(dk, wk).addmm_(dv, wv)  # beta = 1: the sum costs no pass of its own
    return dx, dq.t() @ x, dq.sum(0), dk.t() @ x, dk.sum(0), dv.t() @ x, dv.sum(0)
