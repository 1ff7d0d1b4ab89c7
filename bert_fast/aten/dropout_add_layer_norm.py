"""LN(residual + dropout(x + x_bias)) from PyTorch's operators; on the CPU in fp32 one pass of the C++ routine."""

import torch
from torch import Tensor

from bert_fast.aten._native import address, dropout_arguments, routines
from bert_fast.aten.dropout import dropout_bwd, dropout_fwd

__all__ = ["dropout_add_layer_norm_bwd", "dropout_add_layer_norm_fwd"]


def dropout_add_layer_norm_fwd(
    x: Tensor, residual: Tensor, x_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, h, mean, rstd), as `reference.dropout_add_layer_norm`."""
    lib = routines(x, residual, x_bias, weight, bias)
    if lib is not None and len(x):  # empty tensors have no address
        x, residual, weight, bias = (t.contiguous() for t in (x, residual, weight, bias))
        x_bias, coords = (None if t is None else t.contiguous() for t in (x_bias, coords))
        y, h = torch.empty_like(x), torch.empty_like(x)
        mean, rstd = x.new_empty(len(x)), x.new_empty(len(x))
        key, site, threshold, scale = dropout_arguments(dropout_p, seed, site)
        lib.dropout_add_layer_norm_fwd(
            x.data_ptr(), address(x_bias), residual.data_ptr(), weight.data_ptr(), bias.data_ptr(),
            y.data_ptr(), h.data_ptr(), mean.data_ptr(), rstd.data_ptr(), x.shape[0], x.shape[1], eps,
            address(coords), key, site, threshold, scale, torch.get_num_threads(),
        )  # fmt: skip
        return y, h, mean, rstd
    if x_bias is not None:
        x = (x + x_bias).to(x.dtype)  # parameters may be fp32 beside half-precision activations
    if dropout_p > 0.0 and len(x):
        x = dropout_fwd(x, dropout_p, seed, coords, site)
    h = residual + x
    y, mean, rstd = torch.native_layer_norm(_wide(h), h.shape[-1:], _wide(weight), _wide(bias), eps)
    return y.to(h.dtype), h, mean.squeeze(-1), rstd.squeeze(-1)


def dropout_add_layer_norm_bwd(
    dy: Tensor, h: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dresidual, dx_bias, dweight, dbias), as `reference.dropout_add_layer_norm`."""
    lib = routines(dy, h, mean, rstd, weight)
    if lib is not None and len(h):
        dy, h, weight = dy.contiguous(), h.contiguous(), weight.contiguous()
        coords = None if coords is None else coords.contiguous()
        dresidual = torch.empty_like(h)
        dx = torch.empty_like(h) if dropout_p > 0.0 else dresidual
        dx_bias, dweight, dbias = (torch.empty_like(weight) for _ in range(3))
        key, site, threshold, scale = dropout_arguments(dropout_p, seed, site)
        lib.dropout_add_layer_norm_bwd(
            dy.data_ptr(), h.data_ptr(), mean.data_ptr(), rstd.data_ptr(), weight.data_ptr(),
            dresidual.data_ptr(), address(dx if dropout_p > 0.0 else None),
            dx_bias.data_ptr(), dweight.data_ptr(), dbias.data_ptr(),
            h.shape[0], h.shape[1], address(coords), key, site, threshold, scale, torch.get_num_threads(),
        )  # fmt: skip
        return dx, dresidual, dx_bias, dweight, dbias
    wide_weight = _wide(weight)
    dresidual, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        _wide(dy), _wide(h), h.shape[-1:], mean.unsqueeze(1), rstd.unsqueeze(1), wide_weight, wide_weight, [True] * 3
    )
    dresidual = dresidual.to(h.dtype)
    dx = dresidual
    if dropout_p > 0.0:
        dx = dropout_bwd(dresidual, dropout_p, seed, coords, site) if len(h) else torch.empty_like(h)
    dx_bias = dx.sum(0, dtype=wide_weight.dtype).to(weight.dtype)
    return dx, dresidual, dx_bias, dweight.to(weight.dtype), dbias.to(weight.dtype)


def _wide(x: Tensor) -> Tensor:
    """x, in fp32 if it is in half precision: PyTorch's CPU operator would keep half-precision statistics."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
