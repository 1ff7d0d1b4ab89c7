"""act(x Wu^T + bu) Wd^T + bd from library GEMMs; on the CPU over chunks of tokens that stay in the cache.

Without gradients nothing of T * I elements exists on the CPU (`_chunks.py`), with them only the pre-activation that
backward wants. Weight gradients add up over chunks inside the products. On other devices everything is whole.
"""

from collections.abc import Set

from torch import Tensor

from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.reference.mlp import UP, Mlp
from bert_fast.torch._chunks import add_product, add_rows, chunks, joined, num_chunks, sum_dtype
from bert_fast.torch._gemm import cast, linear, matmul
from bert_fast.torch.bias_gelu import bias_gelu_bwd, bias_gelu_fwd


def mlp_fwd(a: Mlp) -> tuple[Tensor, Tensor | None]:
    """(y, pre), as `reference.mlp`, of pre and the activation as rounded to the dtype of x."""
    x = a.x
    up_weight, down_weight = cast(a.up_weight, x.dtype), cast(a.down_weight, x.dtype)
    pre = linear(x, up_weight, a.up_bias) if a.save_pre else None
    parts_of_y = []
    for x_part, pre_part in chunks(num_chunks(x, up_weight.shape[0]), x, pre):
        product = linear(x_part, up_weight, a.up_bias) if pre is None else pre_part
        parts_of_y.append(linear(bias_gelu_fwd(BiasGelu(product, None, a.hidden_act)), down_weight, a.down_bias))
    return joined(parts_of_y), pre


def mlp_bwd(a: Mlp, dy: Tensor, pre: Tensor | None, wants: Set[str], onto: Tensor | None = None) -> dict[str, Tensor]:
    """Gradients by name, as `reference.mlp`."""
    up, down = cast(a.up_weight, dy.dtype), cast(a.down_weight, dy.dtype)
    wants_dpre = not wants.isdisjoint(UP)
    parts_of_dx: list[Tensor] = []
    sums: dict[str, Tensor] = {}
    count = num_chunks(dy, a.up_weight.shape[0])
    up_dtype, down_dtype = (sum_dtype(weight, count) for weight in (a.up_weight, a.down_weight))
    for dy_part, x_part, pre_part in chunks(count, dy, a.x, pre) if wants_dpre or "down_weight" in wants else ():
        if pre is None:
            pre_part = linear(x_part, up, a.up_bias)
        product = BiasGelu(pre_part, None, a.hidden_act)
        if "down_weight" in wants:
            act = bias_gelu_fwd(product)
            sums["down_weight"] = add_product(sums.get("down_weight"), dy_part, act, down_dtype)
        if wants_dpre:
            dpre = bias_gelu_bwd(product, matmul(dy_part, down))["x"]
            if "x" in wants:
                parts_of_dx.append(matmul(dpre, up))
            if "up_weight" in wants:
                sums["up_weight"] = add_product(sums.get("up_weight"), dpre, x_part, up_dtype)
            if "up_bias" in wants:
                sums["up_bias"] = add_rows(sums.get("up_bias"), dpre, up_dtype)
    made = {name: cast(t, (a.down_weight if name == "down_weight" else a.up_weight).dtype) for name, t in sums.items()}
    if "x" in wants:
        dx = joined(parts_of_dx)
        made["x"] = dx if onto is None else dx.add_(onto)
    if "down_bias" in wants:
        made["down_bias"] = dy.sum(0, dtype=a.down_weight.dtype)
    return made
