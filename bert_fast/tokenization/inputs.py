"""What a caller may pass as text, brought into one form: a flat list of strings and how they belong together."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_fast.tokenization.arguments import members


@dataclass(frozen=True)
class Inputs:
    """The texts of a call, flattened.

    A sample is a text or a pair of texts; each of these is a segment, given as one string or as a list of words.

    Args:
        strings: all texts (or all words of all texts): text and pair of sample 0, text and pair of sample 1, ...;
            or a column of single texts.
        words_per_segment: how many of `strings` each segment has; None: one.
        has_pair (bool [n]): which samples have a second segment.
        is_batched: whether the caller passed a list of samples.
    """

    strings: Any
    words_per_segment: list[int] | None
    has_pair: np.ndarray
    is_batched: bool

    def head(self, count: int) -> "Inputs":
        """The first `count` samples, of inputs that are not split into words."""
        assert self.words_per_segment is None
        num_strings = count + int(self.has_pair[:count].sum())
        return Inputs(self.strings[:num_strings], None, self.has_pair[:count], self.is_batched)


def parse_inputs(
    text: Any,
    text_pair: Any = None,
    is_split_into_words: bool = False,
    names: tuple[str, str] = ("text", "text_pair"),
) -> Inputs:
    """Checks and flattens the arguments `text` and `text_pair` of a call.

    Accepted are a string (or UTF-8 bytes), a list of strings, a list of pairs of strings; with `is_split_into_words` a
    list of words in place of each string; and a column (`is_column`) in place of a list of strings. As in
    `transformers`, an empty second text beside a single first one counts as none, while in a batch it is an empty
    second segment. Messages call the two arguments by their `names`.

    Raises:
        TypeError: something else was passed; the message names its index.
        ValueError: `text` and `text_pair` are batches of different lengths, or a pair has not two members.
    """
    name, pair_name = names
    if is_column(text):
        text = as_list(text, name)
    if is_column(text_pair):
        text_pair = as_list(text_pair, pair_name)
    is_batched = _is_list(text)
    if is_split_into_words:
        if not is_batched:
            raise TypeError(f"{name}: with is_split_into_words=True, expected a list of words, got {_kind(text)}")
        text = list(text)
        is_batched = bool(text) and _is_list(text[0])
    if not is_batched:
        may_be_empty = isinstance(text_pair, (str, bytes)) or _is_list(text_pair)
        is_nothing = text_pair is None or (may_be_empty and len(text_pair) == 0)
        samples = [(text,)] if is_nothing else [(text, text_pair)]
        return _flatten(samples, names, is_split_into_words, is_batched=False)
    texts = list(text)
    if text_pair is None:
        samples = [_as_sample(item, name, index, is_split_into_words) for index, item in enumerate(texts)]
        return _flatten(samples, names, is_split_into_words, is_batched=True)
    if not _is_list(text_pair):
        raise TypeError(f"{pair_name}: expected a list, as {name} is one, got {_kind(text_pair)}")
    pairs = list(text_pair)
    if len(pairs) != len(texts):
        raise ValueError(f"{pair_name}: expected {len(texts)} texts, one for each of {name}, got {len(pairs)}")
    return _flatten(list(zip(texts, pairs, strict=True)), names, is_split_into_words, is_batched=True)


def is_column(value: Any) -> bool:
    """Whether this holds texts without a Python object for each, in a form that the engine reads as it is.

    NumPy arrays of dtype U, S or StringDType, Arrow columns, and (buffer, boundaries).
    """
    if isinstance(value, (str, bytes, list)):
        return False
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "UST" and value.ndim == 1
    if isinstance(value, tuple):
        return len(value) == 2 and isinstance(value[1], np.ndarray) and value[1].dtype == np.int64
    return hasattr(value, "__arrow_c_array__") or hasattr(value, "__arrow_c_stream__")


def column_inputs(column: Any, count: int) -> Inputs:
    """A column of `count` single texts, as it is."""
    return Inputs(column, None, np.zeros(count, dtype=bool), is_batched=True)


def own_texts(texts: Any) -> Any:
    """The same texts where no code changes them later. Arrow columns are taken to be what they are: never changed."""
    if isinstance(texts, (list, np.ndarray)):
        return texts.copy()
    if not isinstance(texts, tuple):
        return texts
    buffer, boundaries = texts
    if not isinstance(buffer, bytes):
        try:
            view = memoryview(buffer)
        except (TypeError, ValueError):  # no buffer, or closed: the engine says so
            return texts
        if view.itemsize == 1 and view.c_contiguous:
            buffer = bytes(view)
    return buffer, boundaries.copy()


def as_list(column: Any, name: str = "text") -> list[Any]:
    """The texts of a column; messages call it `name`.

    Raises:
        TypeError: it holds none that Python can get at.
    """
    if isinstance(column, tuple):
        try:
            data, starts = memoryview(column[0]).cast("B"), column[1].tolist()
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}: expected (buffer, boundaries): {error}") from None
        return [bytes(data[start:stop]) for start, stop in itertools.pairwise(starts)]
    for method in ("to_pylist", "to_list", "tolist"):  # of Arrow's libraries, of NumPy
        if hasattr(column, method):
            return list(getattr(column, method)())
    return members(name, column)


def _as_sample(item: Any, name: str, index: int, is_split_into_words: bool) -> tuple[Any, ...]:
    """A member of a batch as (text,) or (text, pair)."""
    if is_split_into_words:
        is_pair = _is_list(item) and len(item) > 0 and _is_list(item[0])
    else:
        is_pair = _is_list(item)
    if not is_pair:
        return (item,)
    if len(item) != 2:
        hint = "" if is_split_into_words else " (a list of words needs is_split_into_words=True)"
        raise ValueError(f"{name}[{index}]: expected a pair of texts, got {len(item)} members{hint}")
    return tuple(item)


def _flatten(
    samples: Sequence[tuple[Any, ...]], names: tuple[str, str], is_split_into_words: bool, is_batched: bool
) -> Inputs:
    has_pair = np.fromiter((len(sample) == 2 for sample in samples), dtype=bool, count=len(samples))
    segments = [segment for sample in samples for segment in sample]

    def where(segment_index: int) -> str:  # worked out only for messages
        place = 0
        for index, sample in enumerate(samples):
            if segment_index < place + len(sample):
                label = names[segment_index != place]
                return f"{label}[{index}]" if is_batched else label
            place += len(sample)
        raise AssertionError(segment_index)

    if not is_split_into_words:
        for k, segment in enumerate(segments):
            if not isinstance(segment, (str, bytes)):
                raise TypeError(f"{where(k)}: expected a str (or UTF-8 bytes), got {_kind(segment)}")
        return Inputs(segments, None, has_pair, is_batched)
    strings: list[str | bytes] = []
    for k, words in enumerate(segments):
        if not _is_list(words):
            raise TypeError(f"{where(k)}: with is_split_into_words=True, expected a list of words, got {_kind(words)}")
        for position, word in enumerate(words):
            if not isinstance(word, (str, bytes)):
                raise TypeError(f"{where(k)}[{position}]: expected a str (or UTF-8 bytes), got {_kind(word)}")
        strings.extend(words)
    return Inputs(strings, [len(words) for words in segments], has_pair, is_batched)


def _is_list(value: Any) -> bool:
    """Whether this is a list of something, of whatever type (list, tuple, array, column of a table)."""
    return isinstance(value, (list, tuple)) or (
        isinstance(value, Iterable)
        and hasattr(value, "__len__")
        and not isinstance(value, (str, bytes, Mapping))
        and getattr(value, "ndim", 1) != 0
    )


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
