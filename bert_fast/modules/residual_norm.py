"""LN(residual + dropout(product + bias)): how every half of a layer ends, as one op where no code looks inside."""

from torch import Tensor, nn

from bert_fast.modules.call import Call
from bert_fast.modules.fusable import runs_hooks, weight_and_bias
from bert_fast.modules.layer_norm import LayerNorm
from bert_fast.ops.dropout import dropout
from bert_fast.ops.dropout_add_layer_norm import dropout_add_layer_norm

_NORMS = (nn.LayerNorm, LayerNorm)


def is_plain_norm(norm: nn.Module) -> bool:
    """Whether `norm` is a LayerNorm with weight and bias, PyTorch's or ours, and nothing else."""
    return type(norm) in _NORMS and weight_and_bias(norm)[1] is not None and not runs_hooks(norm)


def residual_norm(
    product: Tensor, bias: Tensor | None, residual: Tensor, norm: nn.LayerNorm, dropout_p: float, site: int, call: Call
) -> Tensor:
    """product, residual [M, H] and bias [H] to [M, H], M being the rows of `call.queries`."""
    coords = call.queries.coords
    if is_plain_norm(norm):
        weight, shift = weight_and_bias(norm)
        if bias is not None and bias.dtype is not weight.dtype:  # a LayerNorm that was kept in fp32
            bias = bias.to(weight.dtype)
        return dropout_add_layer_norm(
            product, residual, weight, shift, x_bias=bias, eps=norm.eps, dropout_p=dropout_p, seed=call.seed,
            coords=coords, site=site,
        )  # fmt: skip
    branch = product if bias is None else product + bias
    return norm(residual + dropout(branch, dropout_p, seed=call.seed, coords=coords, site=site))
