"""How well numbers and what a model says of them go together."""

import numpy as np

__all__ = ["correlations"]


def correlations(labels: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    """pearson and spearman, 0 where all labels, or all answers, are the same.

    labels, answers: numbers [n].

    Raises:
        ImportError: SciPy is not installed.
    """
    try:
        from scipy import stats  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"metrics need SciPy: pip install bert_fast[train] ({error})") from None
    labels, answers = labels.astype(np.float64), answers.astype(np.float64)
    are_same = np.ptp(labels) == 0 or np.ptp(answers) == 0  # a correlation with these is not defined
    return {
        "pearson": 0.0 if are_same else float(stats.pearsonr(labels, answers).statistic),
        "spearman": 0.0 if are_same else float(stats.spearmanr(labels, answers).statistic),
    }
