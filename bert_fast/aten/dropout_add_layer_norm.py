"""LN(residual + dropout(x + x_bias)) from PyTorch's operators; on the CPU in fp32 one pass of the C++ routine."""

import torch
from torch import Tensor

from bert_fast.aten._native import address, dropout_arguments, routines
from bert_fast.aten.dropout import dropout_bwd, dropout_fwd
from bert_fast.reference.dropout_add_layer_norm import output_suffices

__all__ = ["dropout_add_layer_norm_bwd", "dropout_add_layer_norm_fwd"]


def dropout_add_layer_norm_fwd(
    x: Tensor, residual: Tensor, x_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int, saves: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, h, mean, rstd), as `reference.dropout_add_layer_norm`."""
    chosen = _choose(saves, weight, bias, x.dtype)
    lib = routines(x, residual, x_bias, weight, bias)
    num_tokens, hidden_size = x.shape
    if lib is not None and num_tokens:  # empty tensors have no address
        x, residual, weight, bias = x.contiguous(), residual.contiguous(), weight.contiguous(), bias.contiguous()
        x_bias = None if x_bias is None else x_bias.contiguous()
        coords = None if coords is None else coords.contiguous()
        y, h = torch.empty_like(x), _new_h(x, saves)
        mean, rstd = x.new_empty(num_tokens), x.new_empty(num_tokens)
        key, site, threshold, scale = dropout_arguments(dropout_p, seed, site)
        lib.dropout_add_layer_norm_fwd(
            x.data_ptr(), address(x_bias), residual.data_ptr(), weight.data_ptr(), bias.data_ptr(),
            y.data_ptr(), address(h if chosen == "input" else None), mean.data_ptr(), rstd.data_ptr(),
            num_tokens, hidden_size, eps, address(coords), key, site, threshold, scale, torch.get_num_threads(),
        )  # fmt: skip
        return y, h, mean, rstd
    if x_bias is not None:
        x = (x + x_bias).to(x.dtype)  # parameters may be fp32 beside half-precision activations
    if dropout_p > 0.0 and num_tokens:
        x = dropout_fwd(x, dropout_p, seed, coords, site)
    # A sum that is not kept need not be rounded either.
    h = residual + x if chosen == "input" else _wide(residual) + x
    y, mean, rstd = torch.native_layer_norm(_wide(h), h.shape[-1:], _wide(weight), _wide(bias), eps)
    if chosen == "output":
        h = _new_h(x, saves)
    return y.to(x.dtype), h, mean.squeeze(-1), rstd.squeeze(-1)


def dropout_add_layer_norm_bwd(
    dy: Tensor, y: Tensor | None, h: Tensor | None, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor,
    dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int, saves: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dresidual, dx_bias, dweight, dbias), as `reference.dropout_add_layer_norm`."""
    from_output = _choose(saves, weight, bias, dy.dtype) == "output"
    kept = y if from_output else h
    assert kept is not None
    lib = routines(dy, kept, rstd, weight, bias)
    num_tokens, hidden_size = dy.shape
    _check_length("weight", weight, hidden_size)
    _check_length("bias", bias, hidden_size)
    if lib is not None and num_tokens:
        dy, kept, weight, bias = dy.contiguous(), kept.contiguous(), weight.contiguous(), bias.contiguous()
        coords = None if coords is None else coords.contiguous()
        dresidual = torch.empty_like(dy)
        dx = torch.empty_like(dy) if dropout_p > 0.0 else dresidual
        dx_bias, dweight, dbias = torch.empty_like(weight), torch.empty_like(weight), torch.empty_like(weight)
        key, site, threshold, scale = dropout_arguments(dropout_p, seed, site)
        lib.dropout_add_layer_norm_bwd(
            dy.data_ptr(), kept.data_ptr(), address(mean), rstd.data_ptr(),
            weight.data_ptr(), address(bias if from_output else None),
            dresidual.data_ptr(), address(dx if dropout_p > 0.0 else None),
            dx_bias.data_ptr(), dweight.data_ptr(), dbias.data_ptr(),
            num_tokens, hidden_size, address(coords), key, site, threshold, scale, torch.get_num_threads(),
        )  # fmt: skip
        return dx, dresidual, dx_bias, dweight, dbias
    wide_weight = _wide(weight)
    if from_output:
        # n rstd' + mean' with mean' = 0 and rstd' = 1 is n itself; the true rstd is a factor of the whole gradient.
        n = (_wide(kept) - _wide(bias)) / wide_weight
        dresidual, dweight, dbias = _layer_norm_backward(
            dy, n, torch.zeros_like(rstd), torch.ones_like(rstd), wide_weight
        )
        dresidual = dresidual * rstd.unsqueeze(1)
    else:
        assert mean is not None
        dresidual, dweight, dbias = _layer_norm_backward(dy, kept, mean, rstd, wide_weight)
    dresidual = dresidual.to(dy.dtype)
    dx = dresidual
    if dropout_p > 0.0:
        dx = dropout_bwd(dresidual, dropout_p, seed, coords, site) if num_tokens else torch.empty_like(dy)
    dx_bias = dx.sum(0, dtype=wide_weight.dtype).to(weight.dtype)
    return dx, dresidual, dx_bias, dweight.to(weight.dtype), dbias.to(weight.dtype)


def _check_length(name: str, parameter: Tensor, hidden_size: int) -> None:
    """Raises ValueError for a parameter that was given other `data` since forward, which autograd does not notice."""
    if parameter.numel() != hidden_size:
        raise ValueError(
            f"{name}: expected {hidden_size} elements in backward, as in forward, got shape {list(parameter.shape)}"
        )


def _layer_norm_backward(
    dy: Tensor, h: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh, dweight, dbias) by PyTorch's operator, in the dtype of weight."""
    return torch.ops.aten.native_layer_norm_backward(
        _wide(dy), _wide(h), h.shape[-1:], mean.unsqueeze(1), rstd.unsqueeze(1), weight, weight, [True] * 3
    )


def _choose(saves: str, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> str:
    """Either "input" or "output". On a GPU, where looking would mean waiting, "device" always keeps h."""
    if saves != "device":
        return saves
    return "output" if weight.device.type == "cpu" and output_suffices(weight, bias, dtype) else "input"


def _new_h(x: Tensor, saves: str) -> Tensor:
    """Room for h where there must be some: [T, H], or [0] where it is known before the call that it is not kept."""
    return x.new_empty(0 if saves == "output" else x.shape)


def _wide(x: Tensor) -> Tensor:
    """x, in fp32 if it is in half precision: PyTorch's CPU operator would keep half-precision statistics."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
