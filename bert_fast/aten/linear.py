"""y = x W^T + b by one library GEMM, its gradients by two."""

from torch import Tensor

from bert_fast.aten._gemm import cast, matmul, weight_gradient

__all__ = ["linear_bwd", "linear_fwd"]


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y, as `reference.linear`; wider parameters are rounded to the dtype of x."""
    return matmul(x, cast(weight, x.dtype).t(), None if bias is None else cast(bias, x.dtype))


def linear_bwd(
    dy: Tensor, x: Tensor | None, weight: Tensor, wants_dx: bool, wants_dweight: bool, wants_dbias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), as `reference.linear`."""
    dx = dweight = dbias = None
    if wants_dx:
        dx = matmul(dy, cast(weight, dy.dtype))
    if wants_dweight:
        assert x is not None
        dweight = weight_gradient(dy, x, weight.dtype)
    if wants_dbias:
        dbias = dy.sum(0, dtype=weight.dtype)
    return dx, dweight, dbias
