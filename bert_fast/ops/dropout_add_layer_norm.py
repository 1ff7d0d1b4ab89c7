"""y = LayerNorm(residual + dropout(x + x_bias)), forward and backward, on any back-end.

Registered as `bert_fast::dropout_add_layer_norm_fwd` and `_bwd`, so `torch.compile` sees two opaque ops. What autograd
saves depends on `saves`, as `reference/dropout_add_layer_norm.py` explains: "output" keeps the very tensor y that is
returned, and rstd; "input" keeps h, mean and rstd; "device" all four. Besides parameters, seed and coords.
"""

import torch
from torch import Tensor

from bert_fast import native
from bert_fast.backend import requested
from bert_fast.checks import check_dtype, check_like, check_number, check_same_device, check_shape, is_alike
from bert_fast.ops._autocast import autocast_operands
from bert_fast.ops._define import define
from bert_fast.ops._signature import check_given
from bert_fast.ops.dropout import check_dropout_state
from bert_fast.reference.dropout import dropout_threshold
from bert_fast.reference.dropout_add_layer_norm import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    SAVES,
    DropoutAddLayerNorm,
    max_shift,
    output_suffices,
)

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_WIDE = (torch.float32, torch.float64)
_STRIDED = torch.strided


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    x_bias: Tensor | None = None,
    eps: float = 1e-12,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    coords: Tensor | None = None,
    site: int = 0,
    backend: str | None = None,
) -> Tensor:
    """y = LayerNorm(residual + dropout(x + x_bias)) * weight + bias, over the last dimension.

    Args:
        x (Tensor [T, H], fp32/fp16/bf16/fp64, one dtype): any strides; H up to 8,192 on the Triton back-end.
        residual (Tensor [T, H], dtype of x): any strides.
        weight (Tensor [H]): of LayerNorm; dtype of x or fp32.
        bias (Tensor [H], dtype of weight): of LayerNorm.
        x_bias (Tensor [H] or None, dtype of weight): added to x before dropout.
        eps: added to the variance as given.
        dropout_p: probability of dropping, rounded to a multiple of 2**-16; 0 in evaluation.
        seed (Tensor [1], int64): of this forward pass, see `draw_seed`. Needed when dropout_p > 0. It is read on the
            device, without a sync.
        coords (Tensor [T, 2], int32): every token's (row, position) in the original batch. Needed when dropout_p > 0.
        site: of the call, see `dropout_site`. Seed, site and coords name the mask (`reference/dropout.py`).
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor [T, H], dtype of x), contiguous, never an alias of an input.

    Raises:
        TypeError, ValueError: the message names the argument.
        BackendError: the named back-end cannot run the call.

    Differentiable once, in x, residual, weight, bias and x_bias. Deterministic: two-stage sums, no atomics.

    Autocast:
        x and residual are cast to the autocast dtype (fp64 stays), so the residual stream stays in it; parameters keep
        theirs and all arithmetic inside is fp32.

    Saves, on the CPU: y itself and rstd, so T fp32 numbers more than what the caller holds anyway, where every |weight|
        is in [2**-10, 2**9] and |bias| <= 1.5 |weight| (8 |weight| in fp32); elsewhere h = residual +
        dropout(x + x_bias), mean and rstd, T * H elements and 2 * T numbers. On other devices and under `torch.compile`
        h is always allocated, but neither written nor read where the weights allow. Nothing under `torch.no_grad`.
        So neither y nor weight and bias may be changed in place before backward; autograd notices, and raises.

    Example:
        >>> x, residual = torch.randn(2, 5, 8)
        >>> y = ops.dropout_add_layer_norm(x, residual, torch.ones(8), torch.zeros(8))
        >>> expected = torch.nn.functional.layer_norm(x + residual, (8,), eps=1e-12)
        >>> torch.allclose(y, expected, atol=1e-5)
        True
    """
    x, residual = autocast_operands(x, residual)
    _check(x, residual, weight, bias, x_bias, dropout_p, seed, coords, site)
    if dropout_threshold(dropout_p) == 0:  # p below 2**-17 drops nothing
        dropout_p, seed, coords = 0.0, None, None  # nothing to replay, nothing to save
    request, saves = requested(backend), what_is_saved(x, weight, bias)
    return _op(
        x, residual, x_bias, weight, bias, check_number("eps", eps), float(dropout_p), seed, coords, int(site), saves,
        request,
    )[0]  # fmt: skip


def what_is_saved(x: Tensor, weight: Tensor, bias: Tensor) -> str:
    """What a call of the op saves for backward, one of `SAVES`.

    The same with and without gradients, since y's last place depends on it.
    """
    # On the CPU looking at the weights takes 3 microseconds (14 without the extension). Elsewhere it would wait for the
    # device; and a graph, or a stand-in for a tensor, cannot be asked.
    is_plain = type(weight) in _PLAIN_TENSORS and type(bias) in _PLAIN_TENSORS
    is_transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if x.device.type != "cpu" or is_transformed or not is_plain:
        return "device"
    if x.dtype in _WIDE and not torch.is_grad_enabled():
        return "output"  # h is not read again, and y is the same to the bit
    return "output" if _output_suffices(weight, bias, x.dtype) else "input"


def _output_suffices(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> bool:
    """`reference.dropout_add_layer_norm.output_suffices` of CPU tensors, by the C++ extension where it can be."""
    lib = native.load()
    if lib is None or weight.dtype != torch.float32 or not (weight.is_contiguous() and bias.is_contiguous()):
        return bool(output_suffices(weight.detach(), bias.detach(), dtype))
    weight_place, bias_place = weight.data_ptr(), bias.data_ptr()
    if not (weight_place and bias_place):  # of PyTorch's own tensors of zeros, which have no memory
        return bool(output_suffices(weight.detach(), bias.detach(), dtype))
    return bool(lib.output_suffices(weight_place, bias_place, len(weight), MIN_WEIGHT, MAX_WEIGHT, max_shift(dtype)))


def _check(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    x_bias: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    coords: Tensor | None,
    site: int,
) -> None:
    # x, weight: what nearly always fits is seen without a call, an op of one token costs little more than its checks.
    is_dense = isinstance(x, Tensor) and x.layout is _STRIDED and not x.is_nested
    if not is_dense or x.dim() != 2 or x.dtype not in _DTYPES or x.shape[1] == 0:
        check_shape("x", x, ("T", "H"))
        if x.shape[1] == 0:
            raise ValueError("x: expected at least one column, got shape [T, 0]")
        check_dtype("x", x, _DTYPES)
    num_tokens, hidden_size = x.shape
    if not is_alike(residual, x):
        check_like("residual", residual, (num_tokens, hidden_size), "x", x)
    is_dense = isinstance(weight, Tensor) and weight.layout is _STRIDED and not weight.is_nested
    if not is_dense or weight.shape != (hidden_size,) or weight.dtype is not x.dtype or weight.device != x.device:
        check_shape("weight", weight, (hidden_size,))
        check_dtype("weight", weight, (x.dtype,) if x.dtype in _WIDE else (x.dtype, torch.float32))
        check_same_device("weight", weight, "x", x)
    if not is_alike(bias, weight):
        check_like("bias", bias, (hidden_size,), "weight", weight)
    if x_bias is not None and not is_alike(x_bias, weight):
        check_like("x_bias", x_bias, (hidden_size,), "weight", weight)
    check_dropout_state(dropout_p, seed, coords, x, site, ("coords", "x"))


_NEEDLESS: dict[str, tuple[str, ...]] = {"input": ("y",), "output": ("h", "mean"), "device": ()}


def _check_saves(a: DropoutAddLayerNorm) -> None:
    if a.saves not in SAVES:
        raise ValueError(f"saves: expected one of {', '.join(SAVES)}, got {a.saves!r}")


def _check_saved(a: DropoutAddLayerNorm, y: Tensor | None, h: Tensor | None, mean: Tensor | None, _: Tensor) -> None:
    """Raises unless what backward reads is there."""
    check_given("y", y, a.saves != "input")
    check_given("h", h, a.saves != "output")
    check_given("mean", mean, a.saves != "output")


_op = define(
    "dropout_add_layer_norm",
    DropoutAddLayerNorm,
    outputs={"y": "x T H", "h": "x T H", "mean": "s T", "rstd": "s T"},
    makes={"h": lambda a: a.saves != "output"},
    backward="dy y? h? mean? rstd weight bias dropout_p seed coords site saves",
    gradients="x residual x_bias weight bias",
    same={"residual": ("x", lambda a: dropout_threshold(a.dropout_p) == 0)},
    needless=lambda a, wants: _NEEDLESS[a.saves],
    last_dimension="hidden_size",
    check=_check_saves,
    check_backward=_check_saved,
)
