"""qkv = x [Wq; Wk; Wv]^T + [bq; bk; bv] on a GPU, and its gradients: three products in all, not nine.

Forward:   qkv = x W^T + b          W [3N, H] and b [3N]: the three weights and biases, which lie side by side in memory
Backward:  dx = dqkv W;   dW = dqkv^T x;   db = sum over rows of dqkv

Shapes: x, dx [T, H]; qkv, dqkv [T, 3N].
Bytes moved, elements of e bytes: e (T H + 3 N H + 3 T N) forward, as many for dx and for dW (written in its own dtype),
3 e T N for db. Three products each would read x three times, in forward and for dW, and move dx five times.
Where the weights are no neighbours (`bert_fast/storage.py`), 6 e N H more for their copy, in forward and again in
backward. Parameters in fp32 beside half precision are rounded as one: 18 N H bytes; their gradients are the products'
fp32 accumulators. Saved: x, and the weights themselves. Precision, determinism: as `triton/linear.py`.
"""

from collections.abc import Set

from torch import Tensor

from bert_fast.reference.linear import Linear
from bert_fast.reference.qkv_projection import QkvProjection
from bert_fast.storage import one_tensor
from bert_fast.triton._column_sums import row_sums
from bert_fast.triton.linear import linear_bwd, linear_fwd


def qkv_projection_fwd(a: QkvProjection) -> Tensor:
    """qkv [T, 3N], as `reference.qkv_projection`, new and contiguous."""
    bias = None if a.bq is None or a.bk is None or a.bv is None else one_tensor(a.bq, a.bk, a.bv)
    return linear_fwd(Linear(a.x, one_tensor(a.wq, a.wk, a.wv), bias))


def qkv_projection_bwd(
    a: QkvProjection, dqkv: Tensor, wants: Set[str], onto: Tensor | None = None
) -> dict[str, Tensor]:
    """Gradients by name, as `reference.qkv_projection`."""
    made = linear_bwd(Linear(a.x, one_tensor(a.wq, a.wk, a.wv), None), dqkv, wants - {"bias"}, onto)
    if "bias" in wants:
        made["bias"] = row_sums(dqkv, a.wq.dtype)
    return made
