"""How well scores put documents of a query in order: MRR, nDCG and average precision, as scikit-learn counts them."""

from collections.abc import Sequence

import numpy as np

__all__ = ["ordering_metrics"]

_DEPTH = 10


def ordering_metrics(scores: Sequence[Sequence[float]], is_relevant: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Means over queries; 0 for a query without a relevant document.

    mrr@10: 1 / place of the first relevant document, 0 where it is beyond 10; of equal scores, relevant ones come last.
    ndcg@10: sum of 1 / log2(place + 1) over relevant documents, divided by what the best order has (Jarvelin &
        Kekalainen 2002, ACM TOIS 20(4)); equal scores share their places.
    map: mean over relevant documents of the share of relevant ones among those with no lower score.

    scores, is_relevant: of the documents of each query, at least one.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.metrics import average_precision_score, ndcg_score
    except ImportError as error:
        raise ImportError(f"metrics need scikit-learn: pip install bert_fast[train] ({error})") from None
    sums = {"mrr@10": 0.0, "ndcg@10": 0.0, "map": 0.0}
    for found, relevant in zip(scores, is_relevant, strict=True):
        wanted, values = np.array(relevant, bool), np.array(found, np.float64)
        if not wanted.any():
            continue
        order = np.lexsort((wanted, -values))[:_DEPTH]
        hits = np.flatnonzero(wanted[order])
        sums["mrr@10"] += 1 / (hits[0] + 1) if len(hits) else 0.0
        # scikit-learn has no nDCG of a single document.
        sums["ndcg@10"] += ndcg_score([wanted], [values], k=_DEPTH) if len(wanted) > 1 else 1.0
        sums["map"] += average_precision_score(wanted, values)
    return {name: float(total) / max(1, len(scores)) for name, total in sums.items()}
