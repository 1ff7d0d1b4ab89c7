"""act(x W^T + b), GELU first of all, as one differentiable op: the first half of BERT's MLP, and its heads.

Registered as `bert_fast::linear_gelu_fwd` and `_bwd`; gradients that are not wanted are not computed.
"""

from collections.abc import Set

import torch
from torch import Tensor

from bert_fast.backend import requested
from bert_fast.checks import check_choice, check_flag
from bert_fast.ops._autocast import autocast_linear_operands
from bert_fast.ops._define import define
from bert_fast.ops._linear_checks import check_activation, check_input, check_parameters
from bert_fast.ops._signature import check_given
from bert_fast.reference.linear_gelu import LinearGelu

# torch's names of the two GELUs -> the config's
_HIDDEN_ACT = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}


def linear_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    hidden_act: str = "gelu",
    save_pre: bool = True,
    backend: str | None = None,
) -> Tensor:
    """y = act(x W^T + b).

    Args:
        x (Tensor [T, K], fp32/fp16/bf16/fp64): input, any strides.
        weight (Tensor [N, K]): dtype of x or, beside half precision, fp32: then cast to the dtype of x within the op,
            and their gradients are fp32.
        bias (Tensor [N] or None, dtype of weight): b.
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

    Differentiable once. Deterministic; no device sync. Saves the parameters; x (T * K elements) where weight wants a
        gradient or pre is not saved; pre (T * N elements) where save_pre asks for it; without gradients nothing.
    Precision: sums in fp32 (fp64 for fp64); half precision rounds pre where it is saved, and y.
    Autocast: x is cast; fp32 parameters are cast within the op, so that no half-precision copy of them is saved.
    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415).

    Example:
        >>> ops.linear_activation(torch.ones(1, 3), -torch.ones(2, 3), None, hidden_act="relu").tolist()
        [[0.0, 0.0]]
    """
    x, weight, bias = autocast_linear_operands(x, weight, bias)
    check_input("x", x)
    check_parameters("weight", weight, "bias", bias, x.shape[1], x)
    check_activation(hidden_act)
    check_flag("save_pre", save_pre)
    has_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return _op(x, weight, bias, hidden_act, save_pre and has_gradient, requested(backend))[0]


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: str = "none",
    save_pre: bool = True,
    backend: str | None = None,
) -> Tensor:
    """y = gelu(x W^T + b), with GELU(z) = z * Phi(z) by erf unless tanh is asked for.

    Args:
        x (Tensor [T, K], fp32/fp16/bf16/fp64): as for `linear_activation`, of which this is a case.
        weight (Tensor [N, K]): as there.
        bias (Tensor [N] or None): as there.
        approximate: "none" (erf, BERT's default) or "tanh".
        save_pre: whether backward finds the pre-activation saved, or computes it again.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor [T, N], dtype of x; autocast's dtype under autocast), contiguous.

    Raises:
        TypeError, ValueError, BackendError: as for `linear_activation`.

    Example:
        >>> ops.linear_gelu(torch.zeros(1, 3), torch.ones(2, 3), None).tolist()
        [[0.0, 0.0]]
    """
    check_choice("approximate", approximate, _HIDDEN_ACT)
    return linear_activation(x, weight, bias, hidden_act=_HIDDEN_ACT[approximate], save_pre=save_pre, backend=backend)


def _needless(a: LinearGelu, wants: Set[str]) -> tuple[str, ...]:
    if not a.save_pre:  # which is an empty tensor then
        return ("pre",)
    return ("bias",) if "weight" in wants else ("bias", "x")


def _check_backward(a: LinearGelu, pre: Tensor | None, wants: Set[str]) -> None:
    check_given("x", a.x, pre is None or "weight" in wants)


_op = define(
    "linear_gelu",
    LinearGelu,
    outputs={"y": "x T N", "pre": "x T N"},
    makes={"pre": lambda a: a.save_pre},
    backward="dy x? weight bias? pre? hidden_act",
    gradients="x? weight? bias?",
    needless=_needless,
    check_backward=_check_backward,
)
