"""y = act(x + bias), forward and backward, on any back-end; GELU (erf or tanh), ReLU, SiLU and tanh.

Registered as `bert_fast::bias_gelu_fwd` and `_bwd` on [T, N]; autograd saves x and bias alone.
"""

from typing import Any

import torch
from torch import Tensor

from bert_fast import backend as backends
from bert_fast.checks import check_dtype, check_same_device, check_shape, check_tensor
from bert_fast.ops._register import custom_op
from bert_fast.reference.activations import ACTIVATIONS

__all__ = ["bias_activation", "bias_gelu"]

_OP = "bias_gelu"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# torch's names of the two GELUs -> the config's
_HIDDEN_ACT = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}


@custom_op("bias_gelu_fwd", tensors={"x": "x T N", "bias": "p N"})
def _fwd(x: Tensor, bias: Tensor | None, hidden_act: str, backend: str) -> Tensor:
    module = backends.resolve(_OP, backends.OpSpec.of(x), backend)
    # The fake implementation promises this layout; PyTorch's own operators would keep that of a transposed x.
    return module.bias_gelu_fwd(x, bias, hidden_act).contiguous()


@_fwd.register_fake
def _(x: Tensor, bias: Tensor | None, hidden_act: str, backend: str) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("bias_gelu_bwd", tensors={"x": "x T N", "dy": "x T N", "bias": "p N"})
def _bwd(dy: Tensor, x: Tensor, bias: Tensor | None, hidden_act: str, backend: str) -> tuple[Tensor, Tensor]:
    module = backends.resolve(_OP, backends.OpSpec.of(x), backend)
    dx, dbias = module.bias_gelu_bwd(dy, x, bias, hidden_act)
    return dx.contiguous(), x.new_empty(0) if dbias is None else dbias


@_bwd.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor | None, hidden_act: str, backend: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, ctx.hidden_act, ctx.backend = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    dx, dbias = _bwd(dy, x, bias, ctx.hidden_act, ctx.backend)
    return dx, None if bias is None else dbias, None, None


_fwd.register_autograd(_backward, setup_context=_setup_context)


def bias_activation(
    x: Tensor, bias: Tensor | None = None, *, hidden_act: str = "gelu", backend: str | None = None
) -> Tensor:
    """y = act(x + bias), elementwise.

    x (Tensor [..., N], fp32/fp16/bf16/fp64): any number of leading dimensions, any strides.
    bias (Tensor [N] or None): of the dtype of x or, beside half precision, fp32.
    hidden_act: a name that a configuration may give: "gelu" (erf), "gelu_new" or "gelu_pytorch_tanh" (two names of
        tanh-GELU), "relu", "silu" or "swish", "tanh".
    backend: "triton", "torch" or "reference"; None takes the first that can run the call.
    Returns: y (Tensor, shape and dtype of x), contiguous, never an alias of an input.

    Raises:
        TypeError: x or bias is no tensor of the dtypes above, hidden_act is not a string.
        ValueError: shapes or devices do not fit, hidden_act is none of the names.
        BackendError: the forced back-end cannot run the call.

    Precision: computed in fp32 (fp64 for fp64) and rounded once; on the Triton back-end half-precision results are
        within 0.56 units in the last place, also where they are tiny (docs/kernels/bias_gelu.md).
    Saves x and bias, not x + bias and not y. Differentiable once, in x and bias. Deterministic: two-stage sums, no
        atomics. No device sync. Autocast casts nothing here, as for PyTorch's activations.
    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415).
    """
    _check(x, bias, hidden_act)
    rows = x.reshape(-1, x.shape[-1])
    return _fwd(rows, bias, hidden_act, backends.requested(backend)).view(x.shape)


def bias_gelu(
    x: Tensor, bias: Tensor | None = None, *, approximate: str = "none", backend: str | None = None
) -> Tensor:
    """y = gelu(x + bias), elementwise, with GELU(z) = z * Phi(z) by erf unless tanh is asked for.

    x (Tensor [..., N]); bias (Tensor [N] or None); approximate: "none" (erf, BERT's default) or "tanh". All else as for
    `bias_activation`, of which this is a case.
    """
    if not isinstance(approximate, str) or approximate not in _HIDDEN_ACT:
        raise ValueError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    return bias_activation(x, bias, hidden_act=_HIDDEN_ACT[approximate], backend=backend)


def _check(x: Tensor, bias: Tensor | None, hidden_act: str) -> None:
    check_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected shape [..., N] with at least one column, got {list(x.shape)}")
    check_dtype("x", x, _DTYPES)
    if bias is not None:
        check_shape("bias", bias, (x.shape[-1],))
        check_dtype("bias", bias, (x.dtype,) if x.dtype in (torch.float32, torch.float64) else (x.dtype, torch.float32))
        check_same_device("bias", bias, "x", x)
    if not isinstance(hidden_act, str):
        raise TypeError(f"hidden_act: expected a string, got {type(hidden_act).__name__}")
    if hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act: expected one of {sorted(ACTIVATIONS)}, got {hidden_act!r}")
