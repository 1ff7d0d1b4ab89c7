"""y = LayerNorm(residual + dropout(x + x_bias)), forward and backward, on any back-end.

Registered as `bert_fast::dropout_add_layer_norm_fwd` and `_bwd`, so `torch.compile` sees two opaque ops. What autograd
saves depends on `saves`, as `reference/dropout_add_layer_norm.py` explains: "output" keeps the very tensor y that is
returned, and rstd; "input" keeps h, mean and rstd; "device" all four. Besides parameters, seed and coords. The request
for a back-end travels as the last argument: backward runs where forward was asked to run.
"""

import torch
from torch import Tensor

from bert_fast import backend as backends
from bert_fast import native
from bert_fast.checks import check_dtype, check_like, check_number, check_same_device, check_shape, is_alike
from bert_fast.ops._autocast import autocast_operands
from bert_fast.ops._register import custom_op
from bert_fast.ops._signature import check_given
from bert_fast.ops.dropout import check_dropout_state
from bert_fast.reference.dropout import dropout_threshold
from bert_fast.reference.dropout_add_layer_norm import MAX_WEIGHT, MIN_WEIGHT, SAVES, max_shift, output_suffices

__all__ = ["dropout_add_layer_norm"]

_OP = "dropout_add_layer_norm"
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_WIDE = (torch.float32, torch.float64)


def _check_saves(saves: str) -> None:
    if saves not in SAVES:
        raise ValueError(f"saves: expected one of {', '.join(SAVES)}, got {saves!r}")


def _check_saved(y: Tensor | None, h: Tensor | None, mean: Tensor | None, saves: str) -> None:
    """Raises unless what backward reads is there."""
    _check_saves(saves)
    check_given("y", y, saves != "input")
    check_given("h", h, saves != "output")
    check_given("mean", mean, saves != "output")


@custom_op(
    "dropout_add_layer_norm_fwd",
    tensors={
        "x": "x T H+", "residual": "x T H", "x_bias": "p H", "weight": "p H", "bias": "p H", "seed": "int64 1",
        "coords": "int32 T 2",
    },
    check=lambda *arguments: _check_saves(arguments[-2]),
)  # fmt: skip
def _fwd(
    x: Tensor,
    residual: Tensor,
    x_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    coords: Tensor | None,
    site: int,
    saves: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    module = backends.resolve(_OP, backends.OpSpec.of(x, hidden_size=x.shape[1]), backend)
    y, h, mean, rstd = module.dropout_add_layer_norm_fwd(
        x, residual, x_bias, weight, bias, eps, dropout_p, seed, coords, site, saves
    )
    # The fake implementation promises this layout; PyTorch's own operators would keep that of a transposed x.
    return y.contiguous(), h.contiguous(), mean, rstd


@_fwd.register_fake
def _(x, residual, x_bias, weight, bias, eps, dropout_p, seed, coords, site, saves, backend):  # type: ignore[no-untyped-def]
    statistics_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = y.new_empty(0) if saves == "output" else torch.empty_like(y)
    mean, rstd = (x.new_empty(x.shape[:1], dtype=statistics_dtype) for _ in range(2))
    return y, h, mean, rstd


@custom_op(
    "dropout_add_layer_norm_bwd",
    tensors={
        "dy": "x T H+", "y": "x T H", "h": "x T H", "mean": "s T", "rstd": "s T", "weight": "p H", "bias": "p H",
        "seed": "int64 1", "coords": "int32 T 2",
    },
    check=lambda dy, y, h, mean, *rest: _check_saved(y, h, mean, rest[-2]),
)  # fmt: skip
def _bwd(
    dy: Tensor,
    y: Tensor | None,
    h: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    coords: Tensor | None,
    site: int,
    saves: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    module = backends.resolve(_OP, backends.OpSpec.of(dy, hidden_size=dy.shape[1]), backend)
    dx, dresidual, dx_bias, dweight, dbias = module.dropout_add_layer_norm_bwd(
        dy, y, h, mean, rstd, weight, bias, dropout_p, seed, coords, site, saves
    )
    if dropout_p == 0.0:  # dx is dresidual, and two outputs of an op may not share memory: see `_backward`
        dresidual = dx.new_empty(0)
    return dx.contiguous(), dresidual.contiguous(), dx_bias, dweight, dbias


@_bwd.register_fake
def _(dy, y, h, mean, rstd, weight, bias, dropout_p, seed, coords, site, saves, backend):  # type: ignore[no-untyped-def]
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    dresidual = dx.new_empty(0) if dropout_p == 0.0 else torch.empty_like(dx)
    dx_bias, dweight, dbias = (torch.empty_like(weight) for _ in range(3))
    return dx, dresidual, dx_bias, dweight, dbias


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, _, x_bias, weight, bias, _, dropout_p, seed, coords, site, saves, backend = inputs
    y, h, mean, rstd = output
    ctx.mark_non_differentiable(h, mean, rstd)
    ctx.set_materialize_grads(False)  # or autograd would fill a [T, H] gradient of h with zeros
    kept_y = None if saves == "input" else y
    kept_h, kept_mean = (None, None) if saves == "output" else (h, mean)
    ctx.save_for_backward(kept_y, kept_h, kept_mean, rstd, weight, bias, seed, coords)
    ctx.has_x_bias = x_bias is not None
    ctx.arguments = (dropout_p, site, saves, backend)


def _backward(ctx, dy, *_):  # type: ignore[no-untyped-def]
    y, h, mean, rstd, weight, bias, seed, coords = ctx.saved_tensors
    dropout_p, site, saves, backend = ctx.arguments
    dx, dresidual, dx_bias, dweight, dbias = _bwd(
        dy, y, h, mean, rstd, weight, bias, dropout_p, seed, coords, site, saves, backend
    )
    if dropout_p == 0.0:
        dresidual = dx
    return dx, dresidual, dx_bias if ctx.has_x_bias else None, dweight, dbias, *[None] * 7


_fwd.register_autograd(_backward, setup_context=_setup_context)


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

    x, residual (Tensor [T, H], fp32/fp16/bf16/fp64, one dtype): any strides; H up to 8,192 on the Triton back-end.
    weight, bias (Tensor [H]), x_bias (Tensor [H] or None): one dtype, that of x or fp32.
    eps: added to the variance as given.
    dropout_p: probability of dropping, rounded to a multiple of 2**-16; 0 in evaluation.
    seed (Tensor [1], int64), coords (Tensor [T, 2], int32): what names the mask, with site (see
        `reference/dropout.py`): the seed of this forward pass, and every token's (row, position) in the original
        batch. Needed when dropout_p > 0. No sync: the seed is read on the device.
    backend: "triton", "torch" or "reference"; None takes the first that can run the call.
    Returns: y (Tensor [T, H], dtype of x), contiguous, never an alias of an input.
    Raises: TypeError, ValueError naming the argument; BackendError if the named back-end cannot run the call.
    Differentiable once, in x, residual, weight, bias and x_bias. Deterministic: two-stage sums, no atomics.
    Autocast: x and residual are cast to the autocast dtype (fp64 stays), so the residual stream stays in it; parameters
        keep theirs and all arithmetic inside is fp32.
    Saves, on the CPU: y itself and rstd, so T fp32 numbers more than what the caller holds anyway, where every |weight|
        is in [2**-10, 2**9] and |bias| <= 1.5 |weight| (8 |weight| in fp32); elsewhere h = residual +
        dropout(x + x_bias), mean and rstd, T * H elements and 2 * T numbers. On other devices and under `torch.compile`
        h is always allocated, but neither written nor read where the weights allow. Nothing under `torch.no_grad`.
        So neither y nor weight and bias may be changed in place before backward; autograd notices, and raises.
    """
    x, residual = autocast_operands(x, residual)
    _check(x, residual, weight, bias, x_bias, dropout_p, seed, coords, site)
    if dropout_threshold(dropout_p) == 0:  # p below 2**-17 drops nothing
        dropout_p, seed, coords = 0.0, None, None  # nothing to replay, nothing to save
    request, saves = backends.requested(backend), _saves(x, weight, bias)
    return _fwd(
        x, residual, x_bias, weight, bias, check_number("eps", eps), float(dropout_p), seed, coords, int(site), saves,
        request,
    )[0]  # fmt: skip


def _saves(x: Tensor, weight: Tensor, bias: Tensor) -> str:
    """What this call saves for backward; the same with and without gradients, since y's last place depends on it."""
    # On the CPU looking at the weights takes 3 microseconds (14 without the extension). Elsewhere it would wait for the
    # device; and a graph, or a stand-in for a tensor, cannot be asked.
    is_plain = type(weight) in _PLAIN_TENSORS and type(bias) in _PLAIN_TENSORS
    is_transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if x.device.type != "cpu" or is_transformed or not is_plain:
        return "device"
    if x.dtype in _WIDE and not torch.is_grad_enabled():
        return "output"  # nobody will read h, and y is the same to the bit
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
    check_shape("x", x, ("T", "H"))
    num_tokens, hidden_size = x.shape
    if hidden_size == 0:
        raise ValueError("x: expected at least one column, got shape [T, 0]")
    check_dtype("x", x, _DTYPES)
    if not is_alike(residual, x):
        check_like("residual", residual, (num_tokens, hidden_size), "x", x)
    check_shape("weight", weight, (hidden_size,))
    check_dtype("weight", weight, (x.dtype,) if x.dtype in _WIDE else (x.dtype, torch.float32))
    check_same_device("weight", weight, "x", x)
    if not is_alike(bias, weight):
        check_like("bias", bias, (hidden_size,), "weight", weight)
    if x_bias is not None and not is_alike(x_bias, weight):
        check_like("x_bias", x_bias, (hidden_size,), "weight", weight)
    check_dropout_state(dropout_p, seed, coords, x, site, ("coords", "x"))
