"""x W^T + b as a differentiable op, on the fastest matrix product of the device."""

from torch import Tensor

from bert_fast.backend import requested
from bert_fast.ops._autocast import autocast_linear_operands
from bert_fast.ops._define import define
from bert_fast.ops._linear_checks import check_input, check_parameters
from bert_fast.ops._signature import check_given
from bert_fast.reference.linear import Linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """y = x W^T + b.

    Args:
        x (Tensor [T, K], fp32/fp16/bf16/fp64): input, any strides.
        weight (Tensor [N, K]): dtype of x or, beside half precision, fp32: then cast to the dtype of x within the op,
            and their gradients are fp32.
        bias (Tensor [N] or None, dtype of weight): b.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor [T, N], dtype of x; autocast's dtype under autocast), contiguous.

    Raises:
        TypeError: dtypes differ or are none of these. ValueError: shapes do not fit or devices differ.
        BackendError: the forced back-end cannot run the call.

    Differentiable once. Deterministic; no device sync. Saves weight, and x where weight wants a gradient.
    Precision: sums in fp32 (fp64 for fp64), on CUDA in fp32 with TF32 as PyTorch is set.
    Autocast: x is cast; fp32 parameters are cast within the op, so that no half-precision copy of them is saved.

    Example:
        >>> ops.linear(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(4)).tolist()
        [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    x, weight, bias = autocast_linear_operands(x, weight, bias)
    check_input("x", x)
    check_parameters("weight", weight, "bias", bias, x.shape[1], x)
    return _op(x, weight, bias, requested(backend))


_op = define(
    "linear",
    Linear,
    outputs={"y": "x T N"},
    backward="dy x? weight",
    gradients="x? weight? bias?",
    needless=lambda a, wants: () if "weight" in wants else ("x",),
    check_backward=lambda a, wants: check_given("x", a.x, "weight" in wants),
)
