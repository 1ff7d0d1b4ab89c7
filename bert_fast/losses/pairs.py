"""Losses of pairs of texts with a score or a label each."""

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.losses._rows import check_factor, check_rows, check_scores, in_wide_precision
from bert_fast.reference.precision import wide

__all__ = ["contrastive", "cosent", "cosine_mse"]


@in_wide_precision
def cosine_mse(first: Tensor, second: Tensor, scores: Tensor) -> Tensor:
    """Mean of (cos(first_i, second_i) - score_i)^2.

    first, second (Tensor [B, D], floating): embeddings, B >= 1. scores (Tensor [B], numbers): from -1 to 1.
    Returns: Tensor [], fp32 (fp64 for fp64). Raises: TypeError, ValueError naming the argument.
    Source: Reimers & Gurevych 2019 (arXiv:1908.10084), section 3.
    """
    check_rows(first=first, second=second)
    check_scores("scores", scores, "first", first)
    cosines = F.cosine_similarity(wide(first), wide(second))
    return F.mse_loss(cosines, scores.to(cosines))


@in_wide_precision
def cosent(first: Tensor, second: Tensor, scores: Tensor, *, scale: float = 20.0) -> Tensor:
    """log(1 + sum of exp(scale * (cos_i - cos_j)) over all i, j with score_i < score_j): pairs in the right order.

    first, second (Tensor [B, D], floating): embeddings, B >= 1. scores (Tensor [B], numbers): only their order counts;
        pairs of equal scores are not compared. scale: 1 / temperature.
    Returns: Tensor [], fp32 (fp64 for fp64); 0 where nothing is compared.
    Raises: TypeError, ValueError naming the argument.
    Memory: B numbers, not B^2: pairs are sorted by score, and the sum over i is one running log-sum-exp.
    Source: Su 2022, CoSENT (kexue.fm/archives/8847); Huang et al. 2024 (IEEE/ACM TASLP 32, 2800-2813).
    """
    check_rows(first=first, second=second)
    check_scores("scores", scores, "first", first)
    scale = check_factor("scale", scale)
    ordered, order = scores.detach().sort(stable=True)
    values = scale * F.cosine_similarity(wide(first), wide(second)).index_select(0, order)
    below = torch.searchsorted(ordered, ordered)  # how many scores are smaller
    sums = values.logcumsumexp(0).index_select(0, (below - 1).clamp(min=0))
    terms = (sums - values).masked_fill(below == 0, -torch.inf)
    return torch.cat((terms.new_zeros(1), terms)).logsumexp(0)


@in_wide_precision
def contrastive(first: Tensor, second: Tensor, labels: Tensor, *, margin: float = 0.5) -> Tensor:
    """Half the mean of d_i^2 where the label is 1, of max(0, margin - d_i)^2 where it is 0; d_i = 1 - cos.

    first, second (Tensor [B, D], floating): embeddings, B >= 1. labels (Tensor [B], numbers): 1 for pairs that belong
        together, 0 for others. margin: distance from which on others are far enough.
    Returns: Tensor [], fp32 (fp64 for fp64). Raises: TypeError, ValueError naming the argument.
    Source: Hadsell et al. 2006 (CVPR), equation 4, with cosines for Euclidean distances.
    """
    check_rows(first=first, second=second)
    check_scores("labels", labels, "first", first)
    margin = check_factor("margin", margin)
    distances = 1 - F.cosine_similarity(wide(first), wide(second))
    labels = labels.to(distances)
    losses = labels * distances.square() + (1 - labels) * F.relu(margin - distances).square()
    return losses.mean() / 2
