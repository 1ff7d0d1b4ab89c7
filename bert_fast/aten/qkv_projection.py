"""q, k, v = x W^T + b, three library GEMMs; dx accumulates inside the GEMMs instead of by separate additions."""

from torch import Tensor

from bert_fast.aten._gemm import matmul, matmul_add
from bert_fast.aten.linear import linear_fwd

__all__ = ["qkv_projection_bwd", "qkv_projection_fwd"]


def qkv_projection_fwd(
    x: Tensor, wq: Tensor, bq: Tensor, wk: Tensor, bk: Tensor, wv: Tensor, bv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), each [T, A * D], as `reference.qkv_projection`."""
    return linear_fwd(x, wq, bq), linear_fwd(x, wk, bk), linear_fwd(x, wv, bv)


def qkv_projection_bwd(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dwq, dbq, dwk, dbk, dwv, dbv), as `reference.qkv_projection`."""
    dx = matmul_add(dv, wv, matmul_add(dk, wk, matmul(dq, wq)))
    return (
        dx,
        matmul(dq.t(), x), dq.sum(0),
        matmul(dk.t(), x), dk.sum(0),
        matmul(dv.t(), x), dv.sum(0),
    )  # fmt: skip
