"""Scores of relative positions: a learned vector for every distance from a query to a key.

With E the table of distances -(M-1) .. M-1 (M = max_position_embeddings, so E is [2M-1, D]) and
e[i, j] = E[position_q[i] - position_k[j] + M - 1], the score of query i and key j gains, before it is scaled,

    relative_key            q_i . e[i, j]
    relative_key_query      q_i . e[i, j] + k_j . e[i, j]

Backward, for one head's gradient ds [Sq, Sk] of these scores:

    dq_i  = sum_j ds[i, j] e[i, j]
    dk_j  = sum_i ds[i, j] e[i, j]                              (relative_key_query only)
    dE[r] = sum over the (i, j) at distance r of ds[i, j] q_i   (+ ds[i, j] k_j)

All functions work on one sequence, all heads at once.
Sources: Shaw et al. 2018 (arXiv:1803.02155), equation 4; Huang et al. 2020 (arXiv:2009.13658), method 4.
"""

import torch
from torch import Tensor

POSITION_EMBEDDING_TYPES = ("absolute", "relative_key", "relative_key_query")


def _distance_rows(positions_q: Tensor, positions_k: Tensor, distance_table: Tensor) -> Tensor:
    """The table's row for every (query, key): int64 [Sq, Sk]."""
    farthest = (distance_table.shape[0] - 1) // 2
    return positions_q[:, None].long() - positions_k[None, :].long() + farthest


def relative_scores_fwd(
    q: Tensor, k: Tensor, distance_table: Tensor, positions_q: Tensor, positions_k: Tensor, key_term: bool
) -> Tensor:
    """What relative positions add to the unscaled scores of one sequence.

    q (Tensor [A, Sq, D]); k (Tensor [A, Sk, D]); distance_table (Tensor [2M-1, D]).
    positions_q (Tensor [Sq], int); positions_k (Tensor [Sk], int): less than M apart.
    key_term: False for relative_key, True for relative_key_query.
    Returns: scores (Tensor [A, Sq, Sk]).
    """
    e = distance_table[_distance_rows(positions_q, positions_k, distance_table)]  # [Sq, Sk, D]
    scores = torch.einsum("aqd,qkd->aqk", q, e)
    if key_term:
        scores = scores + torch.einsum("akd,qkd->aqk", k, e)
    return scores


def relative_scores_bwd(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    distance_table: Tensor,
    positions_q: Tensor,
    positions_k: Tensor,
    key_term: bool,
    wants_ddistance_table: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `relative_scores_fwd`.

    dscores (Tensor [A, Sq, Sk]); the rest as in forward.
    Returns: dq [A, Sq, D]; dk [A, Sk, D], None for relative_key; ddistance_table [2M-1, D], None where not wanted.
    """
    rows = _distance_rows(positions_q, positions_k, distance_table)
    e = distance_table[rows]
    dq = torch.einsum("aqk,qkd->aqd", dscores, e)
    dk = torch.einsum("aqk,qkd->akd", dscores, e) if key_term else None
    if not wants_ddistance_table:
        return dq, dk, None
    de = torch.einsum("aqk,aqd->qkd", dscores, q)
    if key_term:
        de = de + torch.einsum("aqk,akd->qkd", dscores, k)
    return dq, dk, torch.zeros_like(distance_table).index_add_(0, rows.flatten(), de.flatten(0, 1))
