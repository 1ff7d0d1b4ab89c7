"""Losses of triplets: an anchor, what belongs to it, and what does not."""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.checks import check_choice
from bert_fast.losses._rows import check_factor, check_rows, check_scores, in_wide_precision
from bert_fast.reference.precision import wide

__all__ = ["margin_mse", "triplet"]

Distance = Literal["euclidean", "cosine", "manhattan"]
_DISTANCES: tuple[Distance, ...] = get_args(Distance)


@in_wide_precision
def triplet(
    anchors: Tensor, positives: Tensor, negatives: Tensor, *, margin: float = 5.0, distance: Distance = "euclidean"
) -> Tensor:
    """Mean of max(0, d(anchor_i, positive_i) - d(anchor_i, negative_i) + margin).

    anchors, positives, negatives (Tensor [B, D], floating): embeddings, B >= 1.
    distance: "euclidean", "manhattan", whose gradient is 0 where two are equal, or "cosine", 1 - cos. margin: for
        cosines at most 2.
    Returns: Tensor [], fp32 (fp64 for fp64). Raises: TypeError, ValueError naming the argument.
    Source: Schroff et al. 2015 (arXiv:1503.03832), section 3.1; Reimers & Gurevych 2019 (arXiv:1908.10084), section 3.
    """
    check_rows(anchors=anchors, positives=positives, negatives=negatives)
    check_choice("distance", distance, _DISTANCES)
    margin = check_factor("margin", margin)
    if distance == "cosine" and margin > 2:
        raise ValueError(f"margin: expected at most 2 for cosines, whose distances are no larger, got {margin}")
    near, far = (_distance(wide(anchors), wide(other), distance) for other in (positives, negatives))
    return F.relu(near - far + margin).mean()


def _distance(a: Tensor, b: Tensor, distance: Distance) -> Tensor:
    if distance == "cosine":
        return 1 - F.cosine_similarity(a, b)
    return torch.linalg.vector_norm(a - b, ord=2 if distance == "euclidean" else 1, dim=1)


@in_wide_precision
def margin_mse(queries: Tensor, positives: Tensor, negatives: Tensor, margins: Tensor) -> Tensor:
    """Mean of ((query_i . positive_i - query_i . negative_i) - margin_i)^2: a teacher's margins, learned.

    queries, positives, negatives (Tensor [B, D], floating): embeddings, B >= 1. margins (Tensor [B], numbers): by how
        much a better model, a cross-encoder say, scores the positive above the negative.
    Returns: Tensor [], fp32 (fp64 for fp64). Raises: TypeError, ValueError naming the argument.
    Source: Hofstaetter et al. 2020 (arXiv:2010.02666), section 3.
    """
    check_rows(queries=queries, positives=positives, negatives=negatives)
    check_scores("margins", margins, "queries", queries)
    asked = wide(queries)
    found = (asked * wide(positives)).sum(1) - (asked * wide(negatives)).sum(1)
    return F.mse_loss(found, margins.to(found))
