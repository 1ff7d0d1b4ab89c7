"""Numbers of many ranges in one array, for rows of unequal lengths without a loop over them."""

import numpy as np

__all__ = ["ranges"]


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of every start, one range behind the other: [5, 0], [2, 3] gives [5, 6, 0, 1, 2].

    Args:
        starts (int [n]): first numbers.
        lengths (int [n]): how many of each, 0 or more.

    Returns:
        int64 [sum of lengths].
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)
