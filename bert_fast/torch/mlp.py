"""act(x Wu^T + bu) Wd^T + bd from library GEMMs; on the CPU over chunks of tokens that stay in the cache.

What lies between the two products, [T, I], is four times as wide as what goes in and comes out. On the CPU it is made
a chunk of tokens at a time, used while it is in the cache, and its memory used again: without gradients nothing of
T * I elements exists, with them only the pre-activation that backward wants. Weight gradients add up over chunks inside
the products. On other devices everything is whole.
"""

import itertools
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor

from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.reference.mlp import UP, Mlp
from bert_fast.torch._gemm import cast, linear, matmul, matmul_add, weight_gradient
from bert_fast.torch.bias_gelu import bias_gelu_bwd, bias_gelu_fwd

# The most that a chunk of a [T, I] tensor takes. Two or three of them are alive at once: larger ones leave the cache,
# and the allocator gives their memory back to the system; smaller ones read and write the weights and their gradients
# more often. 512 tokens of BERT-base and -large, 1,024 of MiniLM in fp32: measured in docs/kernels/mlp.md.
CHUNK_BYTES = 2**23


def mlp_fwd(a: Mlp) -> tuple[Tensor, Tensor | None]:
    """(y, pre), as `reference.mlp`, of pre and the activation as rounded to the dtype of x."""
    x = a.x
    up_weight, down_weight = cast(a.up_weight, x.dtype), cast(a.down_weight, x.dtype)
    pre = linear(x, up_weight, a.up_bias) if a.save_pre else None
    parts_of_y = []
    for x_part, pre_part in _chunks(_num_chunks(x, up_weight), x, pre):
        product = linear(x_part, up_weight, a.up_bias) if pre is None else pre_part
        parts_of_y.append(linear(bias_gelu_fwd(BiasGelu(product, None, a.hidden_act)), down_weight, a.down_bias))
    return _joined(parts_of_y), pre


def mlp_bwd(a: Mlp, dy: Tensor, pre: Tensor | None, wants: Set[str], onto: Tensor | None = None) -> dict[str, Tensor]:
    """Gradients by name, as `reference.mlp`."""
    up, down = cast(a.up_weight, dy.dtype), cast(a.down_weight, dy.dtype)
    wants_dpre = not wants.isdisjoint(UP)
    parts_of_dx: list[Tensor] = []
    sums: dict[str, Tensor] = {}
    count = _num_chunks(dy, a.up_weight)
    up_dtype, down_dtype = (_sum_dtype(weight, count) for weight in (a.up_weight, a.down_weight))
    for dy_part, x_part, pre_part in _chunks(count, dy, a.x, pre) if wants_dpre or "down_weight" in wants else ():
        if pre is None:
            pre_part = linear(x_part, up, a.up_bias)
        product = BiasGelu(pre_part, None, a.hidden_act)
        if "down_weight" in wants:
            act = bias_gelu_fwd(product)
            sums["down_weight"] = _add_product(sums.get("down_weight"), dy_part, act, down_dtype)
        if wants_dpre:
            dpre = bias_gelu_bwd(product, matmul(dy_part, down))["x"]
            if "x" in wants:
                parts_of_dx.append(matmul(dpre, up))
            if "up_weight" in wants:
                sums["up_weight"] = _add_product(sums.get("up_weight"), dpre, x_part, up_dtype)
            if "up_bias" in wants:
                part = dpre.sum(0, dtype=up_dtype)
                sums["up_bias"] = part if "up_bias" not in sums else sums["up_bias"].add_(part)
    made = {name: cast(t, (a.down_weight if name == "down_weight" else a.up_weight).dtype) for name, t in sums.items()}
    if "x" in wants:
        dx = _joined(parts_of_dx)
        made["x"] = dx if onto is None else dx.add_(onto)
    if "down_bias" in wants:
        made["down_bias"] = dy.sum(0, dtype=a.down_weight.dtype)
    return made


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
