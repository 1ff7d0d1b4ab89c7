"""How well embeddings find what belongs to a query: recall, MRR and nDCG, as information retrieval counts them."""

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["METRICS", "rankings", "retrieval_metrics"]

_DEPTH = 10
_BLOCK = 1 << 22  # scores in memory
METRICS = ("recall@1", f"recall@{_DEPTH}", f"mrr@{_DEPTH}", f"ndcg@{_DEPTH}")


def rankings(
    queries: np.ndarray, documents: np.ndarray, depth: int, *, similarity: str = "cosine"
) -> tuple[np.ndarray, np.ndarray]:
    """The documents nearest to each query, the nearest first.

    queries (fp32 [Q, H]), documents (fp32 [N, H]). depth: how many; at most N come.
    similarity: "cosine" or "dot".
    Returns: rows of documents (int64 [Q, depth]), their scores (fp32 [Q, depth]). Equal scores are ordered by row.
    Never more than a block of scores is in memory.
    """
    asked, given = (torch.from_numpy(np.ascontiguousarray(one, dtype=np.float32)) for one in (queries, documents))
    if similarity == "cosine":
        asked, given = (torch.nn.functional.normalize(one, dim=1) for one in (asked, given))
    depth = min(depth, len(given))
    rows, scores = np.empty((len(asked), depth), np.int64), np.empty((len(asked), depth), np.float32)
    size = max(1, _BLOCK // max(1, len(given)))
    for start in range(0, len(asked), size):
        block = asked[start : start + size] @ given.T
        top, order = block.sort(dim=1, descending=True, stable=True)
        rows[start : start + size], scores[start : start + size] = order[:, :depth].numpy(), top[:, :depth].numpy()
    return rows, scores


def retrieval_metrics(ranked: np.ndarray, relevant: Sequence[set[int]]) -> dict[str, float]:
    """Means over queries of:

    recall@k: share of a query's relevant documents among its first k.
    mrr@10: 1 / place of the first relevant document; 0 where it is beyond 10.
    ndcg@10: sum of 1 / log2(place + 1) over relevant documents, divided by what the best order has (Jarvelin &
        Kekalainen 2002, ACM TOIS 20(4)).

    ranked (int64 [Q, 10 or fewer]): see `rankings`. relevant: rows of each query's documents, at least one.
    """
    sums = dict.fromkeys(METRICS, 0.0)
    for found, wanted in zip(ranked.tolist(), relevant, strict=True):
        hits = [place for place, row in enumerate(found, 1) if row in wanted]
        sums["recall@1"] += sum(place == 1 for place in hits) / len(wanted)
        sums[f"recall@{_DEPTH}"] += len(hits) / len(wanted)
        sums[f"mrr@{_DEPTH}"] += 1 / hits[0] if hits else 0.0
        best = sum(1 / np.log2(place + 1) for place in range(1, min(len(wanted), _DEPTH) + 1))
        sums[f"ndcg@{_DEPTH}"] += sum(1 / np.log2(place + 1) for place in hits) / best
    return {name: float(total) / max(1, len(relevant)) for name, total in sums.items()}
