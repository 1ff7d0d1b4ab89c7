"""qkv = x W^T + b by one library GEMM over the three weights, its gradients by two."""

import torch
from torch import Tensor

from bert_fast.aten._gemm import matmul, matmul_add
from bert_fast.aten.linear import linear_bwd, linear_fwd
from bert_fast.storage import one_tensor, view_of_neighbours

__all__ = ["qkv_projection_bwd", "qkv_projection_fwd"]


def qkv_projection_fwd(
    x: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor, bk: Tensor | None, wv: Tensor, bv: Tensor | None
) -> Tensor:
    """qkv [T, 3N], as `reference.qkv_projection`."""
    weight = view_of_neighbours(wq, wk, wv)
    if weight is None and len(x) < x.shape[1]:  # less to copy: [T, 3N] instead of [3N, H]
        return torch.cat([linear_fwd(x, wq, bq), linear_fwd(x, wk, bk), linear_fwd(x, wv, bv)], dim=1)
    if weight is None:
        weight = torch.cat([wq, wk, wv])
    return linear_fwd(x, weight, None if bq is None or bk is None or bv is None else one_tensor(bq, bk, bv))


def qkv_projection_bwd(
    dqkv: Tensor,
    x: Tensor | None,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wants_dx: bool,
    wants_dweight: bool,
    wants_dbias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), as `reference.qkv_projection`."""
    weight = view_of_neighbours(wq, wk, wv)
    if weight is None and len(dqkv) < wq.shape[1]:  # as above: no copy at all, dx is added up within the products
        _, dweight, dbias = linear_bwd(dqkv, x, wq, False, wants_dweight, wants_dbias)
        return _sum_of_products(dqkv, wq, wk, wv) if wants_dx else None, dweight, dbias
    if weight is None:
        weight = torch.cat([wq, wk, wv])
    return linear_bwd(dqkv, x, weight, wants_dx, wants_dweight, wants_dbias)


def _sum_of_products(dqkv: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    dq, dk, dv = dqkv.chunk(3, dim=1)
    wq, wk, wv = (w.to(dqkv.dtype) for w in (wq, wk, wv))
    return matmul_add(dv, wv, matmul_add(dk, wk, matmul(dq, wq)))
