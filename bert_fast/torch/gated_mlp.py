"""(dropout(act(x Wg^T + bg) * (x Wu^T + bu))) Wd^T + bd from library GEMMs; on the CPU over chunks of tokens.

Without gradients nothing of T * I elements exists on the CPU (`_chunks.py`), with them only gate and up, which backward
wants. Weight gradients add up over chunks inside the products. What is elementwise walks over chunks of these chunks.
On other devices everything is whole. The product with the weights of gate and up is one where they are neighbours in
memory, else two.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.reference.gated_mlp import OF_PRE, GatedMlp, needs_pre
from bert_fast.storage import one_tensor, view_of_neighbours
from bert_fast.torch._chunks import add_product, add_rows, chunks, joined, num_chunks, sum_dtype
from bert_fast.torch._gemm import cast, linear, matmul, matmul_add
from bert_fast.torch.bias_gelu import bias_gelu_bwd, bias_gelu_fwd
from bert_fast.torch.dropout import dropout_fwd

# The most that a chunk of a [T, I] tensor takes: of the products, which take longer the fewer rows they have, and of
# what lies between them, where five or six tensors of a chunk stay in the cache (docs/kernels/gated_mlp.md).
PRODUCT_BYTES, ELEMENTWISE_BYTES = 2**24, 2**21

_Parts = Sequence[tuple[Tensor, Tensor | None]]  # weights and biases of gate and up: of both as one, or of each


def gated_mlp_fwd(a: GatedMlp) -> tuple[Tensor, Tensor | None]:
    """(y, pre), as `reference.gated_mlp`, of gate, up and their product as rounded to the dtype of x."""
    x, parts, down = a.x, _parts(a, a.x.dtype), cast(a.down_weight, a.x.dtype)
    pre = None
    if a.save_pre:
        pre = linear(x, *parts[0]) if len(parts) == 1 else x.new_empty((len(x), 2 * len(a.up_weight)))
    parts_of_y = []
    for x_part, coords, pre_part in chunks(num_chunks(x, len(a.up_weight), PRODUCT_BYTES), x, a.coords, pre):
        if pre is None or len(parts) > 1:
            gate, up = _gate_and_up(x_part, parts)
            if pre is not None:
                torch.cat([gate, up], 1, out=pre_part)
        else:
            gate, up = pre_part.tensor_split(2, dim=1)
        parts_of_y.append(linear(_gated(a, gate, up, coords), down, a.down_bias))
    return joined(parts_of_y), pre


def gated_mlp_bwd(a: GatedMlp, dy: Tensor, pre: Tensor | None, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, as `reference.gated_mlp`."""
    parts, down = _parts(a, dy.dtype), cast(a.down_weight, dy.dtype)
    parts_of_dx: list[Tensor] = []
    sums: dict[str, Tensor] = {}
    count = num_chunks(dy, len(a.up_weight), PRODUCT_BYTES)
    pre_dtype, down_dtype = (sum_dtype(weight, count) for weight in (a.gate_weight, a.down_weight))
    for dy_part, x_part, coords, pre_part in chunks(count, dy, a.x, a.coords, pre) if needs_pre(wants) else ():
        gate, up = _gate_and_up(x_part, parts) if pre is None else pre_part.tensor_split(2, dim=1)
        if wants.isdisjoint(OF_PRE):
            h = _gated(a, gate, up, coords)
        else:
            h, dpre = _gated_bwd(a, gate, up, matmul(dy_part, down), coords)
            if "x" in wants:
                parts_of_dx.append(_sum_of_products(dpre, parts))
            if "weight" in wants:
                sums["weight"] = add_product(sums.get("weight"), dpre, x_part, pre_dtype)
            if "bias" in wants:
                sums["bias"] = add_rows(sums.get("bias"), dpre, pre_dtype)
        if "down_weight" in wants:
            sums["down_weight"] = add_product(sums.get("down_weight"), dy_part, h, down_dtype)
    made = {n: cast(t, (a.down_weight if n == "down_weight" else a.gate_weight).dtype) for n, t in sums.items()}
    if "x" in wants:
        made["x"] = joined(parts_of_dx)
    if "down_bias" in wants:
        made["down_bias"] = dy.sum(0, dtype=a.down_weight.dtype)
    return made


def _gated(a: GatedMlp, gate: Tensor, up: Tensor, coords: Tensor | None) -> Tensor:
    """dropout(act(gate) * up) [T, I], new."""
    h = up.new_empty(up.shape)
    for gate_part, up_part, coords_part, h_part in _cached(gate, up, coords, h):
        torch.mul(bias_gelu_fwd(BiasGelu(gate_part, None, a.hidden_act)), up_part, out=h_part)
        _drop(a, h_part, coords_part)
    return h


def _gated_bwd(a: GatedMlp, gate: Tensor, up: Tensor, dh: Tensor, coords: Tensor | None) -> tuple[Tensor, Tensor]:
    """(dropout(act(gate) * up) [T, I] in the memory of dh, [dgate | dup] [T, 2I]); dh: before dropout's mask."""
    dpre = dh.new_empty((dh.shape[0], 2 * dh.shape[1]))
    for gate_part, up_part, coords_part, dh_part, *halves in _cached(
        gate, up, coords, dh, *dpre.tensor_split(2, dim=1)
    ):
        dgate, dup = halves
        product = BiasGelu(gate_part, None, a.hidden_act)
        act = bias_gelu_fwd(product)
        _drop(a, dh_part, coords_part)
        dgate.copy_(bias_gelu_bwd(product, dh_part * up_part)["x"])
        torch.mul(act, dh_part, out=dup)
        torch.mul(act, up_part, out=dh_part)
        _drop(a, dh_part, coords_part)
    return dh, dpre


def _cached(up: Tensor, *tensors: Tensor | None) -> Iterable[tuple[Any, ...]]:
    """The tensors [T, ...] by chunks that stay in the cache."""
    return chunks(num_chunks(up, up.shape[1], ELEMENTWISE_BYTES), up, *tensors)


def _drop(a: GatedMlp, h: Tensor, coords: Tensor | None) -> None:
    if coords is not None:
        h.copy_(dropout_fwd(h, a.dropout_p, a.seed, coords, a.site))


def _parts(a: GatedMlp, dtype: torch.dtype) -> _Parts:
    """The parameters of gate and up, weights in this dtype: as one where the weights are neighbours."""
    both = view_of_neighbours(a.gate_weight, a.up_weight)
    if both is None:
        return (cast(a.gate_weight, dtype), a.gate_bias), (cast(a.up_weight, dtype), a.up_bias)
    bias = None if a.gate_bias is None or a.up_bias is None else one_tensor(a.gate_bias, a.up_bias)
    return ((cast(both, dtype), bias),)


def _gate_and_up(x: Tensor, parts: _Parts) -> Sequence[Tensor]:
    """Two of [T, I]."""
    made = [linear(x, *part) for part in parts]
    return made if len(made) == 2 else made[0].tensor_split(2, dim=1)


def _sum_of_products(dpre: Tensor, parts: _Parts) -> Tensor:
    """dgate Wg + dup Wu [T, H] of dpre = [dgate | dup], and of the weights of `parts`."""
    if len(parts) == 1:
        return matmul(dpre, parts[0][0])
    (gate_weight, _), (up_weight, _) = parts
    dgate, dup = dpre.tensor_split(2, dim=1)
    return matmul_add(dup, up_weight, matmul(dgate, gate_weight))
