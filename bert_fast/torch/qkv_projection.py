"""qkv = x W^T + b by one library GEMM over the three weights, its gradients by two."""

from collections.abc import Set

import torch
from torch import Tensor

from bert_fast.reference.linear import Linear
from bert_fast.reference.qkv_projection import QkvProjection
from bert_fast.storage import one_tensor, view_of_neighbours
from bert_fast.torch._gemm import linear, matmul, matmul_add
from bert_fast.torch.linear import linear_bwd


def qkv_projection_fwd(a: QkvProjection) -> Tensor:
    """qkv [T, 3N], as `reference.qkv_projection`."""
    x, wq, bq, wk, bk, wv, bv = a
    weight = view_of_neighbours(wq, wk, wv)
    if weight is None and len(x) < x.shape[1]:  # less to copy: [T, 3N] instead of [3N, H]
        return torch.cat([linear(*part) for part in a.parts], dim=1)
    if weight is None:
        weight = torch.cat([wq, wk, wv])
    return linear(x, weight, None if bq is None or bk is None or bv is None else one_tensor(bq, bk, bv))


def qkv_projection_bwd(
    a: QkvProjection, dqkv: Tensor, wants: Set[str], onto: Tensor | None = None
) -> dict[str, Tensor]:
    """Gradients by name, as `reference.qkv_projection`."""
    wq, wk, wv = a.wq, a.wk, a.wv
    weight = view_of_neighbours(wq, wk, wv)
    if weight is None and len(dqkv) < wq.shape[1]:  # as above: no copy at all, dx is added up within the products
        made = linear_bwd(Linear(a.x, wq, None), dqkv, wants - {"x"})
        if "x" in wants:
            dx = _sum_of_products(dqkv, wq, wk, wv)
            made["x"] = dx if onto is None else dx.add_(onto)
        return made
    if weight is None:
        weight = torch.cat([wq, wk, wv])
    return linear_bwd(Linear(a.x, weight, None), dqkv, wants, onto)


def _sum_of_products(dqkv: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    dq, dk, dv = dqkv.chunk(3, dim=1)
    wq, wk, wv = (w.to(dqkv.dtype) for w in (wq, wk, wv))
    return matmul_add(dv, wv, matmul_add(dk, wk, matmul(dq, wq)))
