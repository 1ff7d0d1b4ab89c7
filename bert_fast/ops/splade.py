"""SPLADE's vectors of packed texts, on any back-end: the scores of words, one row a token, never exist at once.

Registered as `bert_fast::splade_fwd` and `_bwd`; gradients of inputs that require none are not computed.
"""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from bert_fast.backend import requested
from bert_fast.checks import check_choice, check_ids
from bert_fast.ops._attention_checks import check_cu_seqlens, check_num_tokens
from bert_fast.ops._autocast import autocast_dtype, autocast_linear_operands
from bert_fast.ops._define import define
from bert_fast.ops._linear_checks import check_input, check_parameters
from bert_fast.ops.packing import check_offsets
from bert_fast.reference.splade import ACTIVATIONS, Splade


def splade(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    activation: str = "relu",
    backend: str | None = None,
) -> Tensor:
    """y[b, v] = max over the tokens t of text b of log1p(relu(x_t . weight_v + bias_v)), without the scores [T, V].

    Args:
        x (Tensor [T, H], fp32/fp16/bf16/fp64): packed tokens, any strides.
        weight (Tensor [V, H], V >= 1): dtype of x or, beside half precision, fp32: then cast to the dtype of x within
            the op, and their gradients are fp32.
        bias (Tensor [V] or None, dtype of weight): added to the scores.
        cu_seqlens (Tensor [B + 1], int32): start of every text, then T. A text without tokens gets zeros.
        activation: "relu", or "log1p_relu", which takes log1p twice.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor [B, V], dtype of x; under autocast fp32), contiguous.

    Raises:
        TypeError: dtypes differ or are none of these.
        ValueError: shapes do not fit, devices differ, activation is no such name; on the CPU (elsewhere with
            BERT_FAST_DEBUG=1) offsets that do not rise from 0 to T.
        BackendError: the forced back-end cannot run the call.

    Where several tokens have a word's greatest score, the first gets its gradient; where it is not above 0, none does.
    Differentiable once. Deterministic: no atomics. No device sync.
    Autocast: x is cast; fp32 parameters are cast within the op, so that no half-precision copy of them is saved.

    Precision:
        sums, maxima and logarithms in fp32 (fp64 for fp64); the torch back-end rounds scores to the dtype of x before
        it compares them. y is saved in fp32 and rounded once.

    Saves x, weight, y and the tokens that the maxima are of: T H + V H + 2 B V numbers; without gradients nothing.
    Source: Formal et al. 2021 (arXiv:2109.10086), section 3.1; log1p twice: arXiv:2504.14839.

    Example:
        >>> x, weight = torch.ones(3, 2), torch.ones(4, 2)
        >>> y = ops.splade(x, weight, None, torch.tensor([0, 3], dtype=torch.int32))
        >>> torch.allclose(y, torch.full((1, 4), 3.0).log())  # log1p of the score 2
        True
    """
    is_cast = autocast_dtype(x) is not None
    x, weight, bias = autocast_linear_operands(x, weight, bias)
    check_input("x", x)
    check_parameters("weight", weight, "bias", bias, x.shape[1], x, "V")
    if weight.shape[0] == 0:
        raise ValueError("weight: expected at least one row, got shape [0, H]")
    check_cu_seqlens("cu_seqlens", cu_seqlens, "B + 1", x, "x")
    check_choice("activation", activation, ACTIVATIONS)
    wants_tokens = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    num_texts = cu_seqlens.shape[0] - 1
    y = _op(x, weight, bias, cu_seqlens, num_texts, activation, wants_tokens, requested(backend))[0]
    return y if is_cast else y.to(x.dtype)


def _run(module: Any, a: Splade) -> tuple[Tensor, Tensor | None]:
    check_num_tokens("x", a.x)
    check_offsets("cu_seqlens", a.cu_seqlens, "max_seqlen", a.x.shape[0], a.x.shape[0])
    return module.splade_fwd(a)


def _check(a: Splade) -> None:
    if a.activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {list(ACTIVATIONS)}, got {a.activation!r}")
    if a.num_texts is not None and a.num_texts != a.cu_seqlens.shape[0] - 1:  # backward is not given their number
        raise ValueError(f"num_texts: expected {a.cu_seqlens.shape[0] - 1} (cu_seqlens), got {a.num_texts}")


def _check_backward(a: Splade, y: Tensor, tokens: Tensor, wants: Set[str]) -> None:
    if y.shape[0] != a.cu_seqlens.shape[0] - 1:
        raise ValueError(f"y: expected {a.cu_seqlens.shape[0] - 1} rows (cu_seqlens), got {y.shape[0]}")


def _check_values(a: Splade, dy: Tensor, y: Tensor, tokens: Tensor, wants: Set[str]) -> None:
    check_num_tokens("x", a.x)
    check_offsets("cu_seqlens", a.cu_seqlens, "max_seqlen", a.x.shape[0], a.x.shape[0])
    check_ids("tokens", tokens + 1, a.x.shape[0] + 1)


_op = define(
    "splade",
    Splade,
    outputs={"y": "s num_texts V", "tokens": "int32 num_texts V"},
    makes={"tokens": lambda a: a.wants_tokens},
    backward="dy y tokens x weight cu_seqlens activation",
    gradients="x? weight? bias?",
    copies=("cu_seqlens",),  # a loader may fill its buffer again
    run=_run,
    check=_check,
    check_backward=_check_backward,
    check_values=_check_values,
)
