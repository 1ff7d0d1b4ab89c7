"""SPLADE's vector of a text: how much each word of the vocabulary has to do with it, of the token that says most.

    forward     Z       = x W^T + b                              [T, V]
                m       = max over the tokens of a text of Z     [B, V], and the first token that has it
                y       = f(max(m, 0))                           [B, V], f = log1p, or log1p twice; 0 for no tokens
    backward    g       = dy f'(max(m, 0)) where m > 0, else 0   [B, V], by y: exp(-y), or exp(-y - expm1(y))
                dZ      = g at the token that has the maximum    [T, V], at most one token of a text for each word
                dx      = dZ W                                   [T, H]
                dweight = dZ^T x                                 [V, H]
                dbias   = sum over texts of g                    [V]

f is monotone, so it is applied to the maximum: max f(Z) = f(max Z). Of equal scores the first token's counts. NaN
counts as greater than all numbers. Saved for backward: x, weight, y and the tokens, B * V numbers each.

Source: Formal et al. 2021 (arXiv:2109.10086), section 3.1; log1p twice: Geng et al. 2024 (arXiv:2504.14839).
"""

import itertools
from collections.abc import Set
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.precision import wide

ACTIVATIONS = ("relu", "log1p_relu")  # f is log1p, log1p twice: sentence-transformers' names


class Splade(NamedTuple):
    """The arguments; parameters of the dtype of x or, beside half precision, fp32."""

    x: Annotated[Tensor, "x T H"]
    weight: Annotated[Tensor, "p V+ H"]
    bias: Annotated[Tensor | None, "p V"]
    cu_seqlens: Annotated[Tensor, "int32 ends"]  # start of every text, then T
    num_texts: int  # B, one less than there are ends
    activation: str  # one of ACTIVATIONS
    wants_tokens: bool  # whether the tokens are returned, which backward needs


def activated(top: Tensor, activation: str) -> Tensor:
    """f(max(top, 0))."""
    y = top.relu().log1p()
    return y.log1p() if activation == "log1p_relu" else y


def slope(y: Tensor, activation: str) -> Tensor:
    """f' where f is y."""
    return torch.exp(-y - y.expm1() if activation == "log1p_relu" else -y)


def splade_fwd(a: Splade) -> tuple[Tensor, Tensor | None]:
    """y (Tensor [B, V], fp32; fp64 for fp64); tokens (int32 [B, V], rows of x, -1 where y is 0), or None."""
    scores = wide(a.x) @ wide(a.weight).T
    if a.bias is not None:
        scores = scores + wide(a.bias)
    y = scores.new_zeros(a.num_texts, len(a.weight))
    tokens = torch.full_like(y, -1, dtype=torch.int32)
    ends = a.cu_seqlens.tolist()
    for text, (start, end) in enumerate(itertools.pairwise(ends)):
        if start < end:
            top, token = scores[start:end].max(0)
            y[text] = activated(top, a.activation)
            tokens[text] = torch.where(top <= 0, -1, token + start).int()
    return y, tokens if a.wants_tokens else None


def splade_bwd(a: Splade, dy: Tensor, y: Tensor, tokens: Tensor, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, those that are wanted, of the dtypes of x, weight and weight; dy, y, tokens [B, V].

    a.bias and a.cu_seqlens are not read: may be None.
    """
    g = torch.where(tokens < 0, 0.0, dy * slope(y, a.activation))
    made = {}
    if "x" in wants or "weight" in wants:
        dscores = g.new_zeros(len(a.x) + 1, g.shape[1])
        dscores.scatter_(
            0, torch.where(tokens < 0, len(a.x), tokens).long(), g
        )  # the last row collects pairs without a token
        if "x" in wants:
            made["x"] = (dscores[:-1] @ wide(a.weight)).to(a.x.dtype)
        if "weight" in wants:
            made["weight"] = (dscores[:-1].T @ wide(a.x)).to(a.weight.dtype)
    if "bias" in wants:
        made["bias"] = g.sum(0).to(a.weight.dtype)
    return made
