"""act(x W^T + b): one library GEMM and PyTorch's activation; backward: its derivative and two GEMMs."""

from torch import Tensor

from bert_fast.aten.bias_gelu import bias_gelu_bwd, bias_gelu_fwd
from bert_fast.aten.linear import linear_bwd, linear_fwd

__all__ = ["linear_gelu_bwd", "linear_gelu_fwd"]


def linear_gelu_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, hidden_act: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """(y, pre), as `reference.linear_gelu`, of pre as rounded to the dtype of x."""
    pre = linear_fwd(x, weight, bias)
    return bias_gelu_fwd(pre, None, hidden_act), pre if save_pre else None


def linear_gelu_bwd(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    pre: Tensor | None,
    hidden_act: str,
    wants_dx: bool,
    wants_dweight: bool,
    wants_dbias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), as `reference.linear_gelu`."""
    if pre is None:
        assert x is not None
        pre = linear_fwd(x, weight, bias)
    dpre, _ = bias_gelu_bwd(dy, pre, None, hidden_act)
    return linear_bwd(dpre, x, weight, wants_dx, wants_dweight, wants_dbias)
