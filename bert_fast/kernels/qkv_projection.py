"""qkv = x [Wq; Wk; Wv]^T + [bq; bk; bv] on a GPU, and its gradients: three products in all, not nine.

Forward:   qkv = x W^T + b          W [3N, H] and b [3N]: the three weights and biases, which lie side by side in memory
Backward:  dx = dqkv W;   dW = dqkv^T x;   db = sum over rows of dqkv

Shapes: x, dx [T, H]; qkv, dqkv [T, 3N].
Bytes moved, elements of e bytes: e (T H + 3 N H + 3 T N) forward, as many for dx and for dW (written in its own dtype),
3 e T N for db. Three products each would read x three times, in forward and for dW, and move dx five times.
Where the weights are no neighbours (`bert_fast/storage.py`), 6 e N H more for their copy, in forward and again in
backward. Parameters in fp32 beside half precision are rounded as one: 18 N H bytes; their gradients are the products'
fp32 accumulators. Saved: x, and the weights themselves. Precision, determinism: as `kernels/linear.py`.
"""

from torch import Tensor

from bert_fast.kernels.linear import linear_bwd, linear_fwd
from bert_fast.storage import one_tensor

__all__ = ["qkv_projection_bwd", "qkv_projection_fwd"]


def qkv_projection_fwd(
    x: Tensor, wq: Tensor, bq: Tensor | None, wk: Tensor, bk: Tensor | None, wv: Tensor, bv: Tensor | None
) -> Tensor:
    """qkv [T, 3N]; arguments and result as in `reference/qkv_projection.py`, any strides; qkv is new and contiguous."""
    bias = None if bq is None or bk is None or bv is None else one_tensor(bq, bk, bv)
    return linear_fwd(x, one_tensor(wq, wk, wv), bias)


def qkv_projection_bwd(
    dqkv: Tensor,
    x: Tensor | None,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wants_dx: bool,
    wants_dweight: bool,
    wants_dbias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias); arguments and results as in `reference/qkv_projection.py`, any strides."""
    return linear_bwd(dqkv, x, one_tensor(wq, wk, wv), wants_dx, wants_dweight, wants_dbias)
