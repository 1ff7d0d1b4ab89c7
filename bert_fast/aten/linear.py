"""y = x W^T + b by one library GEMM, its gradients by two."""

from torch import Tensor

from bert_fast.aten._gemm import matmul

__all__ = ["linear_bwd", "linear_fwd"]


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y, as `reference.linear`."""
    return matmul(x, weight.t(), bias)


def linear_bwd(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), as `reference.linear`."""
    return matmul(dy, weight), matmul(dy.t(), x), dy.sum(0)
