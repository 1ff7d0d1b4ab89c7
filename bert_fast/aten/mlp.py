"""act(x Wu^T + bu) Wd^T + bd from library GEMMs; on the CPU over chunks of tokens that stay in the cache.

What lies between the two products, [T, I], is four times as wide as what goes in and comes out. On the CPU it is made
a chunk of tokens at a time, used while it is in the cache, and its memory used again: without gradients nothing of
T * I elements exists, with them only the pre-activation that backward wants. Weight gradients add up over chunks inside
the products. On other devices everything is whole.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bert_fast.aten._gemm import cast, matmul, matmul_add, weight_gradient
from bert_fast.aten.bias_gelu import bias_gelu_bwd, bias_gelu_fwd
from bert_fast.aten.linear import linear_fwd

__all__ = ["CHUNK_BYTES", "chunk_tokens", "mlp_bwd", "mlp_fwd"]

# The most that a chunk of a [T, I] tensor takes. Two or three of them are alive at once: larger ones leave the cache,
# and the allocator gives their memory back to the system; smaller ones read and write the weights and their gradients
# more often. 512 tokens of BERT-base and -large, 1,024 of MiniLM in fp32: measured in docs/kernels/mlp.md.
CHUNK_BYTES = 2**23


def mlp_fwd(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    hidden_act: str,
    save_pre: bool,
) -> tuple[Tensor, Tensor | None]:
    """(y, pre), as `reference.mlp`, of pre and the activation as rounded to the dtype of x."""
    up_weight, down_weight = cast(up_weight, x.dtype), cast(down_weight, x.dtype)
    pre = linear_fwd(x, up_weight, up_bias) if save_pre else None
    parts_of_y = []
    for x_part, pre_part in _chunks(_num_chunks(x, up_weight), x, pre):
        act = bias_gelu_fwd(linear_fwd(x_part, up_weight, up_bias) if pre is None else pre_part, None, hidden_act)
        parts_of_y.append(linear_fwd(act, down_weight, down_bias))
    return _joined(parts_of_y), pre


def mlp_bwd(
    dy: Tensor,
    x: Tensor | None,
    pre: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    hidden_act: str,
    wants_dx: bool,
    wants_dup_weight: bool,
    wants_dup_bias: bool,
    wants_ddown_weight: bool,
    wants_ddown_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dup_weight, dup_bias, ddown_weight, ddown_bias), as `reference.mlp`."""
    up, down = cast(up_weight, dy.dtype), cast(down_weight, dy.dtype)
    wants_dpre = wants_dx or wants_dup_weight or wants_dup_bias
    parts_of_dx: list[Tensor] = []
    dup_weight = dup_bias = ddown_weight = None
    count = _num_chunks(dy, up_weight)
    for dy_part, x_part, pre_part in _chunks(count, dy, x, pre) if wants_dpre or wants_ddown_weight else ():
        if pre is None:
            pre_part = linear_fwd(x_part, up, up_bias)
        if wants_ddown_weight:
            act = bias_gelu_fwd(pre_part, None, hidden_act)
            ddown_weight = _add_product(ddown_weight, dy_part, act, _sum_dtype(down_weight, count))
        if wants_dpre:
            dpre, _ = bias_gelu_bwd(matmul(dy_part, down), pre_part, None, hidden_act)
            if wants_dx:
                parts_of_dx.append(matmul(dpre, up))
            if wants_dup_weight:
                dup_weight = _add_product(dup_weight, dpre, x_part, _sum_dtype(up_weight, count))
            if wants_dup_bias:
                part = dpre.sum(0, dtype=_sum_dtype(up_weight, count))
                dup_bias = part if dup_bias is None else dup_bias.add_(part)
    return (
        _joined(parts_of_dx) if wants_dx else None,
        None if dup_weight is None else cast(dup_weight, up_weight.dtype),
        None if dup_bias is None else cast(dup_bias, up_weight.dtype),
        None if ddown_weight is None else cast(ddown_weight, down_weight.dtype),
        dy.sum(0, dtype=down_weight.dtype) if wants_ddown_bias else None,
    )


def chunk_tokens(intermediate_size: int, dtype: torch.dtype) -> int:
    """The most tokens of a chunk on the CPU: a power of two."""
    return 1 << max(1, CHUNK_BYTES // max(1, intermediate_size * dtype.itemsize)).bit_length() - 1


def _num_chunks(x: Tensor, up_weight: Tensor) -> int:
    """At least one, also of no tokens."""
    if not x.is_cpu:
        return 1
    return max(1, -(-x.shape[0] // chunk_tokens(up_weight.shape[0], x.dtype)))


def _chunks(count: int, *tensors: Tensor | None) -> Iterable[tuple[Any, ...]]:
    """Parts of the tensors [T, ...], of equally many tokens up to one; None in the place of a missing tensor."""
    if count == 1:
        return (tensors,)
    return zip(*(itertools.repeat(None, count) if t is None else t.tensor_split(count) for t in tensors), strict=True)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sum_dtype(weight: Tensor, count: int) -> torch.dtype:
    """Of a gradient of weight that is still being added up: wide where there are several terms."""
    return torch.promote_types(weight.dtype, torch.float32) if count > 1 else weight.dtype


def _add_product(total: Tensor | None, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """total + dy [T, N]^T @ x [T, K] of `dtype`, in the memory of total; it may be missing."""
    if total is None:
        return weight_gradient(dy, x, dtype)
    return matmul_add(dy.t(), x, total) if dtype == x.dtype else total.add_(matmul(dy.t(), x))
