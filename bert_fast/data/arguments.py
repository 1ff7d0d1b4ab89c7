"""Checks of what several sources of examples take."""

from typing import Any

import numpy as np

from bert_fast.checks import check_integer
from bert_fast.tokenization import Tokenizer


def check_tokenizer_kind(tokenizer: Any) -> None:
    """Raises TypeError unless it is a tokenizer of this library."""
    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"tokenizer: expected a BertTokenizer or XLMRobertaTokenizer, got {type(tokenizer).__name__}")


def row_indices(indices: Any, count: int, of: str = "") -> np.ndarray:
    """Numbers of examples as an array: int64 [B].

    Args:
        indices: whole numbers in a list or array.
        count: how many examples there are.
        of: says more of them, for the message.

    Raises:
        TypeError: they are no whole numbers. IndexError: one is below 0 or not below `count`.
    """
    array = whole_numbers("indices", indices)
    wrong = array[(array < 0) | (array >= count)]
    if len(wrong):
        raise IndexError(f"indices: expected 0 to {count - 1}{of}, got {wrong[0]}")
    return array.astype(np.int64, copy=False)


def row_index(index: Any, count: int) -> int:
    """The number of one example, from 0; negative ones count from the end.

    Raises:
        TypeError: it is no whole number. IndexError: there is no such example.
    """
    place = check_integer("index", index)
    if not -count <= place < count:
        raise IndexError(f"index: expected -{count} to {count - 1}, got {place}")
    return place % count


def whole_numbers(name: str, numbers: Any) -> np.ndarray:
    """A list or array of whole numbers as an array [n]; raises TypeError if it is none."""
    try:
        array = np.asarray(numbers)
    except (RuntimeError, TypeError, ValueError):  # lists of unequal lengths, tensors without values
        array = np.empty((), dtype=object)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        is_array = array.dtype != object
        got = f"{array.dtype} {list(array.shape)}" if is_array else type(numbers).__name__
        raise TypeError(f"{name}: expected whole numbers [n], got {got}")
    return array
