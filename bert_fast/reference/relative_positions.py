"""Scores of relative positions: learned vectors for every distance from a query to a key, of every head.

C and P are two tables of distances -(M-1) .. M-1 (M = max_position_embeddings, so both are [2M-1, A, D]). With
c[i, j] = C[position_q[i] - position_k[j] + M - 1] of one head, and p[i, j] likewise, the score of query i and key j
gains, before it is scaled,

    relative_keys       C       q_i . c[i, j]       what queries are multiplied with
    relative_queries    P       k_j . p[i, j]       what keys are multiplied with

either or both. BERT's relative_key has one table for all heads as C, its relative_key_query the same as C and P.
DeBERTa's content-to-position and position-to-content terms are C and P, two tables. (Equation 4 writes the distance of
the latter from the key to the query; the published code looks both up at the distance from the query to the key.)

Backward, for one head's gradient ds [Sq, Sk] of these scores:

    dq_i  = sum_j ds[i, j] c[i, j]      dC[r] = sum over the (i, j) at distance r of ds[i, j] q_i
    dk_j  = sum_i ds[i, j] p[i, j]      dP[r] = sum over the (i, j) at distance r of ds[i, j] k_j

All functions work on one sequence, all heads at once.
Sources: Shaw et al. 2018 (arXiv:1803.02155), equation 4; Huang et al. 2020 (arXiv:2009.13658), method 4; He et al. 2020
(arXiv:2006.03654), equation 4.
"""

from collections.abc import Set

import torch
from torch import Tensor

POSITION_EMBEDDING_TYPES = ("absolute", "relative_key", "relative_key_query")


def _rows(table: Tensor, positions_q: Tensor, positions_k: Tensor) -> Tensor:
    """The table's row for every (query, key): int64 [Sq, Sk]."""
    farthest = (table.shape[0] - 1) // 2
    return positions_q[:, None].long() - positions_k[None, :].long() + farthest


def relative_scores_fwd(
    q: Tensor,
    k: Tensor,
    relative_keys: Tensor | None,
    relative_queries: Tensor | None,
    positions_q: Tensor,
    positions_k: Tensor,
) -> Tensor:
    """What relative positions add to the unscaled scores of one sequence.

    q (Tensor [A, Sq, D]); k (Tensor [A, Sk, D]); relative_keys, relative_queries (Tensor [2M-1, A, D]).
    positions_q (Tensor [Sq], int); positions_k (Tensor [Sk], int): less than M apart.
    Returns: scores (Tensor [A, Sq, Sk]).
    """
    scores = q.new_zeros((q.shape[0], q.shape[1], k.shape[1]))
    if relative_keys is not None:
        c = relative_keys[_rows(relative_keys, positions_q, positions_k)]  # [Sq, Sk, A, D]
        scores = scores + torch.einsum("aqd,qkad->aqk", q, c)
    if relative_queries is not None:
        p = relative_queries[_rows(relative_queries, positions_q, positions_k)]
        scores = scores + torch.einsum("akd,qkad->aqk", k, p)
    return scores


def relative_scores_bwd(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    relative_keys: Tensor | None,
    relative_queries: Tensor | None,
    positions_q: Tensor,
    positions_k: Tensor,
    wants: Set[str],
) -> dict[str, Tensor]:
    """Gradients of `relative_scores_fwd` by name.

    dscores (Tensor [A, Sq, Sk]); the rest as in forward.
    Returns: q [A, Sq, D] where there are relative_keys, k [A, Sk, D] where there are relative_queries, and of the two
        those that are wanted, [2M-1, A, D].
    """
    made = {}
    if relative_keys is not None:
        rows = _rows(relative_keys, positions_q, positions_k)
        made["q"] = torch.einsum("aqk,qkad->aqd", dscores, relative_keys[rows])
        if "relative_keys" in wants:
            made["relative_keys"] = _sum_of_rows(relative_keys, rows, torch.einsum("aqk,aqd->qkad", dscores, q))
    if relative_queries is not None:
        rows = _rows(relative_queries, positions_q, positions_k)
        made["k"] = torch.einsum("aqk,qkad->akd", dscores, relative_queries[rows])
        if "relative_queries" in wants:
            made["relative_queries"] = _sum_of_rows(relative_queries, rows, torch.einsum("aqk,akd->qkad", dscores, k))
    return made


def _sum_of_rows(table: Tensor, rows: Tensor, of_pairs: Tensor) -> Tensor:
    """[2M-1, A, D]: what the pairs [Sq, Sk, A, D] that look at a row give it."""
    return of_pairs.new_zeros(table.shape).index_add_(0, rows.flatten(), of_pairs.flatten(0, 1))
