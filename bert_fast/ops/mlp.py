"""act(x Wu^T + bu) Wd^T + bd, BERT's feed-forward block, as one differentiable op.

Registered as `bert_fast::mlp_fwd` and `_bwd`; gradients that are not wanted are not computed. Why one op and not two:
the activation between the products is never saved (docs/decisions/0009-mlp.md).
"""

from collections.abc import Set

import torch
from torch import Tensor

from bert_fast.backend import requested
from bert_fast.checks import check_flag
from bert_fast.ops._autocast import autocast_linear_operands
from bert_fast.ops._define import define
from bert_fast.ops._linear_checks import check_activation, check_input, check_parameters
from bert_fast.ops._signature import check_given
from bert_fast.reference.mlp import Mlp


def mlp(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None = None,
    *,
    hidden_act: str = "gelu",
    save_pre: bool = True,
    backend: str | None = None,
) -> Tensor:
    """y = act(x Wu^T + bu) Wd^T + bd.

    Args:
        x (Tensor [T, H], fp32/fp16/bf16/fp64): input, any strides.
        up_weight (Tensor [I, H]): dtype of x or, beside half precision, fp32: then cast to the dtype of x within the
            op, and their gradients are fp32.
        up_bias (Tensor [I] or None, dtype of up_weight): bu.
        down_weight (Tensor [N, I]): Wd, of the dtypes of up_weight; N is H in BERT.
        down_bias (Tensor [N] or None, dtype of down_weight): bd.
        hidden_act: a name that a configuration may give: "gelu" (erf), "gelu_new" or "gelu_pytorch_tanh" (two names of
            tanh-GELU), "relu", "silu" or "swish", "tanh".
        save_pre: whether backward finds the pre-activation saved, or computes it again (one more product).
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor [T, N], dtype of x; autocast's dtype under autocast), contiguous.

    Raises:
        TypeError: dtypes differ or are none of these, hidden_act is no string, save_pre no bool.
        ValueError: shapes do not fit, devices differ, hidden_act is none of the names.
        BackendError: the forced back-end cannot run the call.

    Differentiable once. Deterministic; no device sync. Saves the parameters; x (T * H elements) where up_weight wants a
        gradient or pre is not saved; pre (T * I elements) where save_pre asks for it; never the activation; without
        gradients nothing. On the CPU nothing else of more than a chunk of tokens is made between the products.
    Precision: sums in fp32 (fp64 for fp64); half precision rounds pre where it is saved, the activation, and y.
    Autocast: x is cast; fp32 parameters are cast within the op, so that no half-precision copy of them is saved.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.3.

    Example:
        >>> x, up, down = torch.randn(5, 8), torch.randn(12, 8), torch.randn(8, 12)
        >>> y = ops.mlp(x, up, None, down, hidden_act="relu")
        >>> torch.allclose(y, torch.relu(x @ up.T) @ down.T, atol=1e-3)
        True
    """
    x, up_weight, up_bias, down_weight, down_bias = autocast_linear_operands(
        x, up_weight, up_bias, down_weight, down_bias
    )
    check_input("x", x)
    check_parameters("up_weight", up_weight, "up_bias", up_bias, x.shape[1], x, "I")
    check_parameters("down_weight", down_weight, "down_bias", down_bias, up_weight.shape[0], x)
    check_activation(hidden_act)
    check_flag("save_pre", save_pre)
    tensors = (x, up_weight, up_bias, down_weight)  # those whose gradients need pre
    saves_pre = save_pre and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return _op(x, up_weight, up_bias, down_weight, down_bias, hidden_act, saves_pre, requested(backend))[0]


def _needs_pre(wants: Set[str]) -> bool:
    return not wants <= {"down_bias"}


def _needless(a: Mlp, wants: Set[str]) -> tuple[str, ...]:
    if a.save_pre:
        return ("up_bias",) if "up_weight" in wants else ("up_bias", "x")
    return ("pre",) if _needs_pre(wants) else ("pre", "x")  # which is an empty tensor then


def _check_backward(a: Mlp, pre: Tensor | None, wants: Set[str]) -> None:
    check_given("x", a.x, "up_weight" in wants or (pre is None and _needs_pre(wants)))


_op = define(
    "mlp",
    Mlp,
    outputs={"y": "x T N", "pre": "x T I"},
    makes={"pre": lambda a: a.save_pre},
    backward="dy x? pre? up_weight up_bias? down_weight hidden_act",
    gradients="x? up_weight? up_bias? down_weight? down_bias?",
    needless=_needless,
    check_backward=_check_backward,
)
