"""LayerNorm from PyTorch's own operator, with fp32 statistics whatever the dtype."""

import torch
from torch import Tensor

from bert_fast.reference.layer_norm import LayerNorm
from bert_fast.torch._overflow import with_overflows


def layer_norm_fwd(a: LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd), as `reference.layer_norm`."""
    x, weight, bias = _forward_operands(a.x, a.weight, a.bias)
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, a.eps)
    mean, rstd = mean.squeeze(-1), rstd.squeeze(-1)
    if rstd.is_cpu and not rstd.all():
        y, rstd = with_overflows(y, rstd)
    return y.to(a.x.dtype), mean, rstd


def layer_norm_bwd(a: LayerNorm, dy: Tensor, mean: Tensor, rstd: Tensor) -> dict[str, Tensor]:
    """Gradients by name, as `reference.layer_norm`."""
    x, weight = a.x, a.weight
    # Half precision is widened: on the CPU the operator would round the terms of dweight before it adds them up.
    wide = torch.promote_types(x.dtype, mean.dtype) if x.device.type == "cpu" else weight.dtype
    dy_, x_, weight_ = (t.to(wide) for t in (dy, x, weight))
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy_, x_, x.shape[-1:], mean.unsqueeze(1), rstd.unsqueeze(1), weight_, weight_, [True] * 3
    )
    return {"x": dx.to(x.dtype), "weight": dweight.to(weight.dtype), "bias": dbias.to(weight.dtype)}


def _forward_operands(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x and its parameters as the operator takes them with fp32 statistics.

    In half precision the CPU's operator keeps statistics in the dtype of the parameters, so those are widened, which
    spares a wide copy of x. The GPU's always keeps fp32 but wants one dtype: x is widened where parameters are wider.
    """
    if x.dtype in (torch.float16, torch.bfloat16) and x.device.type == "cpu":
        return x, weight.float(), bias.float()
    return x.to(weight.dtype), weight, bias
