"""Losses of scores of a cross-encoder: of single documents, and of the documents of a query beside one another."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.checks import check_choice, check_dtype, check_floating, check_same_device, check_shape
from bert_fast.losses._rows import check_scores, in_wide_precision
from bert_fast.reference.precision import wide

__all__ = ["list_margin_mse", "list_softmax", "score_cross_entropy", "score_mse"]

Targets = Literal["share", "softmax"]
_TARGETS: tuple[Targets, ...] = get_args(Targets)


@in_wide_precision
def score_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean of -(label_i log sigmoid(score_i) + (1 - label_i) log sigmoid(-score_i)).

    scores (Tensor [N], floating): logits, N >= 1. labels (Tensor [N], numbers): from 0 to 1.
    Returns: Tensor [], fp32 (fp64 for fp64). Raises: TypeError, ValueError naming the argument.
    Source: Nogueira & Cho 2019 (arXiv:1901.04085), section 3.
    """
    _check_single(scores, labels)
    return F.binary_cross_entropy_with_logits(wide(scores), labels.to(wide(scores)))


@in_wide_precision
def score_mse(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean of (score_i - label_i)^2: a teacher's scores, learned.

    scores (Tensor [N], floating): logits, N >= 1. labels (Tensor [N], numbers).
    Returns: Tensor [], fp32 (fp64 for fp64). Raises: TypeError, ValueError naming the argument.
    """
    _check_single(scores, labels)
    return F.mse_loss(wide(scores), labels.to(wide(scores)))


@in_wide_precision
def list_softmax(scores: Tensor, labels: Tensor, mask: Tensor | None = None, *, targets: Targets = "share") -> Tensor:
    """Mean over lists i of -sum_j t_ij log p_ij, p_i the softmax of the scores of list i.

    scores (Tensor [B, L], floating): logits of L documents for each of B queries, B, L >= 1. labels (Tensor [B, L],
        numbers). mask (Tensor [B, L], bool): which documents are there, at least one in each list; None: all.
    targets: "share", t_ij = label_ij / sum_j label_ij, of labels from 0 on, one of them above it: where one is 1 and
        the others are 0, the cross-entropy of that document among all. "softmax": t_i is the softmax of the labels.
    Returns: Tensor [], fp32 (fp64 for fp64). Raises: TypeError, ValueError naming the argument.
    Source: Cao et al. 2007, ListNet (ICML, doi:10.1145/1273496.1273513), equation 5; "share" with one document that
        belongs to the query: Gao et al. 2021 (arXiv:2101.08751), section 3.
    """
    check_choice("targets", targets, _TARGETS)
    mask = _checked_mask(scores, labels, mask)
    found = wide(scores).masked_fill(~mask, -math.inf).log_softmax(1).masked_fill(~mask, 0.0)
    wanted = labels.detach().to(found)
    if targets == "softmax":
        wanted = wanted.masked_fill(~mask, -math.inf).softmax(1)
    else:
        wanted = wanted.masked_fill(~mask, 0.0)
        wanted = wanted / wanted.sum(1, keepdim=True)
    return -(wanted * found).sum() / len(scores)


@in_wide_precision
def list_margin_mse(scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over lists i and their documents j > 0 of ((s_i0 - s_ij) - (t_i0 - t_ij))^2: a teacher's margins, learned.

    scores (Tensor [B, L], floating): logits, the document that others are compared with first; B >= 1, L >= 2.
    labels (Tensor [B, L], numbers): the teacher's scores t. mask (Tensor [B, L], bool): which documents are there, the
        first one and another one in each list; None: all.
    Returns: Tensor [], fp32 (fp64 for fp64). Raises: TypeError, ValueError naming the argument.
    Source: Hofstaetter et al. 2020 (arXiv:2010.02666), section 3.
    """
    mask = _checked_mask(scores, labels, mask)[:, 1:]
    if not mask.shape[1]:
        raise ValueError(f"scores: expected at least two documents a list, got shape {list(scores.shape)}")
    found, wanted = wide(scores), labels.detach().to(wide(scores))
    errors = (found[:, :1] - found[:, 1:]) - (wanted[:, :1] - wanted[:, 1:])
    return errors.masked_fill(~mask, 0.0).square().sum() / mask.sum()


def _check_single(scores: Tensor, labels: Tensor) -> None:
    check_floating("scores", scores)
    check_shape("scores", scores, ("N",))
    if not len(scores):
        raise ValueError("scores: expected at least one, got none")
    check_scores("labels", labels, "scores", scores)


def _checked_mask(scores: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    check_floating("scores", scores)
    check_shape("scores", scores, ("B", "L"))
    if not scores.numel():
        raise ValueError(f"scores: expected at least one list and one document, got shape {list(scores.shape)}")
    check_shape("labels", labels, tuple(scores.shape))
    check_same_device("labels", labels, "scores", scores)
    if labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels: expected numbers, got {str(labels.dtype).removeprefix('torch.')}")
    if mask is None:
        return torch.ones_like(scores, dtype=torch.bool)
    check_dtype("mask", mask, (torch.bool,))
    check_shape("mask", mask, tuple(scores.shape))
    check_same_device("mask", mask, "scores", scores)
    return mask
