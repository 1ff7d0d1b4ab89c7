"""y = act(x + bias), forward and backward, on any back-end; GELU (erf or tanh), ReLU, SiLU and tanh.

Registered as `bert_fast::bias_gelu_fwd` and `_bwd` on [T, N]; autograd saves x and bias alone.
"""

import torch
from torch import Tensor

from bert_fast.backend import requested
from bert_fast.checks import check_choice, check_dtype, check_same_device, check_shape, check_tensor
from bert_fast.ops._define import define
from bert_fast.ops._linear_checks import check_activation
from bert_fast.reference.bias_gelu import BiasGelu

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# torch's names of the two GELUs -> the config's
_HIDDEN_ACT = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}


def bias_activation(
    x: Tensor, bias: Tensor | None = None, *, hidden_act: str = "gelu", backend: str | None = None
) -> Tensor:
    """y = act(x + bias), elementwise.

    Args:
        x (Tensor [..., N], fp32/fp16/bf16/fp64): any number of leading dimensions, any strides.
        bias (Tensor [N] or None): of the dtype of x or, beside half precision, fp32.
        hidden_act: a name that a configuration may give: "gelu" (erf), "gelu_new" or "gelu_pytorch_tanh" (two names of
            tanh-GELU), "relu", "silu" or "swish", "tanh".
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor, shape and dtype of x), contiguous, never an alias of an input.

    Raises:
        TypeError: x or bias is no tensor of the dtypes above, hidden_act is not a string.
        ValueError: shapes or devices do not fit, hidden_act is none of the names.
        BackendError: the forced back-end cannot run the call.

    Precision:
        computed in fp32 (fp64 for fp64) and rounded once; on the Triton back-end half-precision results are within 0.56
        units in the last place, also where they are tiny (docs/kernels/bias_gelu.md).

    Saves x and bias, not x + bias and not y. Differentiable once, in x and bias. Deterministic: two-stage sums, no
        atomics. No device sync. Autocast casts nothing here, as for PyTorch's activations.
    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415).

    Example:
        >>> ops.bias_activation(torch.tensor([[-1.0, 1.0]]), torch.tensor([0.5, 0.5]), hidden_act="relu").tolist()
        [[0.0, 1.5]]
    """
    _check(x, bias, hidden_act)
    is_matrix = x.dim() == 2 and x.stride(0) == x.shape[1]  # a view takes as long as all checks, in backward too
    rows = x if is_matrix else x.reshape(-1, x.shape[-1])
    y = _op(rows, bias, hidden_act, requested(backend))
    return y if is_matrix else y.view(x.shape)


def bias_gelu(
    x: Tensor, bias: Tensor | None = None, *, approximate: str = "none", backend: str | None = None
) -> Tensor:
    """y = gelu(x + bias), elementwise, with GELU(z) = z * Phi(z) by erf unless tanh is asked for.

    Args:
        x (Tensor [..., N], fp32/fp16/bf16/fp64): as for `bias_activation`, of which this is a case.
        bias (Tensor [N] or None): as there.
        approximate: "none" (erf, BERT's default) or "tanh".
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor, shape and dtype of x), contiguous.

    Raises:
        TypeError, ValueError, BackendError: as for `bias_activation`.

    Example:
        >>> ops.bias_gelu(torch.tensor([[0.0, 1.0]]), None).tolist()  # doctest: +ELLIPSIS
        [[0.0, 0.8413...]]
    """
    check_choice("approximate", approximate, _HIDDEN_ACT)
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
    check_activation(hidden_act)


_op = define("bias_gelu", BiasGelu, outputs={"y": "x T N"}, backward="dy x bias hidden_act", gradients="x bias")
