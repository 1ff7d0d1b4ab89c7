"""LN(residual + dropout(x + x_bias)) from PyTorch's operators; on the CPU in fp32 one pass of the C++ routine."""

import torch
from torch import Tensor

from bert_fast.reference.dropout_add_layer_norm import AGAIN, DropoutAddLayerNorm, output_suffices
from bert_fast.torch._native import dropout_arguments, routines
from bert_fast.torch._overflow import with_overflows
from bert_fast.torch.dropout import dropout_bwd, dropout_fwd


def dropout_add_layer_norm_fwd(a: DropoutAddLayerNorm) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(y, h, mean, rstd), as `reference.dropout_add_layer_norm`."""
    x, residual, x_bias, weight, bias, eps, dropout_p, seed, coords, site, saves = a
    chosen = _choose(saves, weight, bias, x.dtype)
    lib = routines(x, residual, x_bias, weight, bias)
    num_tokens, hidden_size = x.shape
    if lib is not None and num_tokens:  # empty tensors have no address
        x, residual, weight, bias = x.contiguous(), residual.contiguous(), weight.contiguous(), bias.contiguous()
        x_bias = None if x_bias is None else x_bias.contiguous()
        coords = None if coords is None else coords.contiguous()
        y, h = torch.empty_like(x), None if saves in ("output", AGAIN) else torch.empty_like(x)
        mean, rstd = x.new_empty(num_tokens), x.new_empty(num_tokens)
        key, site, threshold, scale = dropout_arguments(dropout_p, seed, site)
        lib.dropout_add_layer_norm_fwd(
            x.data_ptr(), 0 if x_bias is None else x_bias.data_ptr(), residual.data_ptr(), weight.data_ptr(),
            bias.data_ptr(), y.data_ptr(), 0 if h is None or chosen != "input" else h.data_ptr(), mean.data_ptr(),
            rstd.data_ptr(), num_tokens, hidden_size, eps, 0 if coords is None else coords.data_ptr(), key, site,
            threshold, scale, torch.get_num_threads(),
        )  # fmt: skip
        return y, h, None if saves == AGAIN else mean, rstd
    if x_bias is not None:
        x = (x + x_bias).to(x.dtype)  # parameters may be fp32 beside half-precision activations
    if dropout_p > 0.0 and num_tokens:
        x = dropout_fwd(x, dropout_p, seed, coords, site)
    # A sum that is not kept need not be rounded either.
    h = residual + x if chosen == "input" else _wide(residual) + x
    y, mean, rstd = torch.native_layer_norm(_wide(h), h.shape[-1:], _wide(weight), _wide(bias), eps)
    mean, rstd = mean.squeeze(-1), rstd.squeeze(-1)
    if rstd.is_cpu and not rstd.all():
        y, rstd = with_overflows(y, rstd)
    if saves == AGAIN:
        return y.to(x.dtype), None, None, rstd
    if saves == "output":
        h = None
    elif chosen == "output":
        h = x.new_empty(x.shape)
    return y.to(x.dtype), h, mean, rstd


def dropout_add_layer_norm_bwd(
    a: DropoutAddLayerNorm, dy: Tensor, y: Tensor | None, h: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> dict[str, Tensor]:
    """Gradients by name, as `reference.dropout_add_layer_norm`."""
    _, _, _, weight, bias, _, dropout_p, seed, coords, site, saves = a
    from_output = _choose(saves, weight, bias, dy.dtype) == "output"
    kept = y if from_output else h
    assert kept is not None
    if mean is None and not from_output:
        mean = _wide(kept).mean(1)
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
            dy.data_ptr(), kept.data_ptr(), 0 if mean is None else mean.data_ptr(), rstd.data_ptr(),
            weight.data_ptr(), bias.data_ptr() if from_output else 0,
            dresidual.data_ptr(), dx.data_ptr() if dropout_p > 0.0 else 0,
            dx_bias.data_ptr(), dweight.data_ptr(), dbias.data_ptr(),
            num_tokens, hidden_size, 0 if coords is None else coords.data_ptr(), key, site, threshold, scale,
            torch.get_num_threads(),
        )  # fmt: skip
        return {"x": dx, "residual": dresidual, "x_bias": dx_bias, "weight": dweight, "bias": dbias}
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
    of_columns = {"x_bias": dx.sum(0, dtype=wide_weight.dtype), "weight": dweight, "bias": dbias}
    return {"x": dx, "residual": dresidual} | {name: t.to(weight.dtype) for name, t in of_columns.items()}


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
    """Either "input" or "output". On a GPU, where looking would mean waiting, n is always from h."""
    if saves not in ("device", AGAIN):
        return saves
    return "output" if weight.device.type == "cpu" and output_suffices(weight, bias, dtype) else "input"


def _wide(x: Tensor) -> Tensor:
    """x, in fp32 if it is in half precision: PyTorch's CPU operator would keep half-precision statistics."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
