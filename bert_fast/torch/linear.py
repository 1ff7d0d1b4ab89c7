"""y = x W^T + b by one library GEMM, its gradients by two."""

from collections.abc import Set

from torch import Tensor

from bert_fast.reference.linear import Linear
from bert_fast.torch._gemm import cast, linear, matmul, weight_gradient


def linear_fwd(a: Linear) -> Tensor:
    """y, as `reference.linear`; wider parameters are rounded to the dtype of x."""
    return linear(a.x, a.weight, a.bias)


def linear_bwd(a: Linear, dy: Tensor, wants: Set[str], onto: Tensor | None = None) -> dict[str, Tensor]:
    """Gradients by name, as `reference.linear`."""
    made = {}
    if "x" in wants:
        dx = matmul(dy, cast(a.weight, dy.dtype))
        made["x"] = dx if onto is None else dx.add_(onto)
    if "weight" in wants:
        made["weight"] = weight_gradient(dy, a.x, a.weight.dtype)
    if "bias" in wants:
        made["bias"] = dy.sum(0, dtype=a.weight.dtype)
    return made
