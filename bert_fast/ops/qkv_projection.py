"""Query, key and value of self-attention from one input, as one product and one differentiable op.

Registered as `bert_fast::qkv_projection_fwd` and `_bwd`. The three weights come in as they are; a back-end takes them
for one matrix, without a copy where they are neighbours in memory (`bert_fast/storage.py`). Backward makes one
gradient of all weights and one of all biases, whose parts become the gradients of the three.
"""

from typing import Any

from torch import Tensor

from bert_fast.backend import requested
from bert_fast.checks import is_alike
from bert_fast.ops._autocast import autocast_linear_operands
from bert_fast.ops._define import define
from bert_fast.ops._linear_checks import check_input, check_parameters
from bert_fast.ops._signature import check_given
from bert_fast.reference.qkv_projection import QkvProjection


def qkv_projection(
    x: Tensor,
    wq: Tensor,
    bq: Tensor | None,
    wk: Tensor,
    bk: Tensor | None,
    wv: Tensor,
    bv: Tensor | None,
    *,
    backend: str | None = None,
) -> Tensor:
    """qkv = [x Wq^T + bq | x Wk^T + bk | x Wv^T + bv], side by side in every row.

    Args:
        x (Tensor [T, H], fp32/fp16/bf16/fp64): input, any strides.
        wq (Tensor [N, H]): of queries. All six have the dtype of x or, beside half precision, fp32: then cast to the
            dtype of x within the op, and their gradients are fp32. N = A * D, the same for all three.
        wk (Tensor [N, H]): of keys.
        wv (Tensor [N, H]): of values.
        bq (Tensor [N], dtype of wq): all three biases, or None for all.
        bk (Tensor [N]): of keys.
        bv (Tensor [N]): of values.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        qkv (Tensor [T, 3N], dtype of x; autocast's dtype under autocast), contiguous; as `qkv.view(T, 3, A, D)` it is
        what `ops.attention_qkv` takes.

    Raises:
        TypeError: dtypes differ or are none of these. ValueError: shapes do not fit, devices differ, or some of the
            biases are None. BackendError: the forced back-end cannot run the call.

    Differentiable once. Deterministic; no device sync. Saves the weights, and x where one of them wants a gradient.
    Where the weights (biases) are neighbours in memory nothing is copied; their gradients always are neighbours,
    so `.grad` of one keeps the memory of all three.
    Precision: sums in fp32 (fp64 for fp64), on CUDA in fp32 with TF32 as PyTorch is set.
    Autocast: as `ops.linear`.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2.

    Example:
        >>> x, wq, wk, wv = torch.randn(5, 8), *torch.randn(3, 16, 8)
        >>> ops.qkv_projection(x, wq, None, wk, None, wv, None).shape
        torch.Size([5, 48])
    """
    x, wq, bq, wk, bk, wv, bv = autocast_linear_operands(x, wq, bq, wk, bk, wv, bv)
    check_input("x", x)
    check_parameters("wq", wq, "bq", bq, x.shape[1], x)
    for name, weight, bias in (("k", wk, bk), ("v", wv, bv)):
        if not (is_alike(weight, wq) and is_alike(bias, bq)):
            _refuse(name, weight, bias, wq, bq, x)
    return _op(x, wq, bq, wk, bk, wv, bv, requested(backend))


def _refuse(name: str, weight: Any, bias: Any, wq: Tensor, bq: Tensor | None, x: Tensor) -> None:
    """Raises with what is wrong with the parameters of key or value."""
    if (bias is None) != (bq is None):
        wanted, got = ("None", "a Tensor") if bq is None else ("a Tensor", "None")
        raise ValueError(f"b{name}: expected {wanted} as bq is (all three biases or none), got {got}")
    check_parameters(f"w{name}", weight, f"b{name}", bias, x.shape[1], x, wq.shape[0])
    wanted, got = (str(t.dtype).removeprefix("torch.") for t in (wq, weight))
    raise TypeError(f"w{name}: expected dtype {wanted} (that of wq), got {got}")


_op = define(
    "qkv_projection",
    QkvProjection,
    outputs={"qkv": "x T 3N"},
    backward="dqkv x? wq wk wv",
    gradients="x? weight? bias?",
    joined={"weight": ("wq", "wk", "wv"), "bias": ("bq", "bk", "bv")},
    needless=lambda a, wants: () if "weight" in wants else ("x",),
    check_backward=lambda a, wants: check_given("x", a.x, "weight" in wants),
)
