"""How close an answer is to the right ones: the rules of SQuAD's official scripts.

Both measures look at what is left of a text without upper case, ASCII punctuation, the articles "a", "an" and "the",
and spaces at its ends: "The  Panthers!" is "panthers". They do not know where words end in text without spaces: an
answer in Chinese is one word, right or wrong as a whole.

Source: Rajpurkar et al. 2016 (arXiv:1606.05250), section 6.1; Rajpurkar et al. 2018 (arXiv:1806.03822) for questions
without an answer.
"""

import re
import reprlib
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

__all__ = ["exact_match", "f1", "normalized"]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """What of an answer counts."""
    if not isinstance(text, str):
        raise TypeError(f"text: expected a str, got {type(text).__name__}")
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 if the answer is one of the right ones, else 0.

    Args:
        answer: "" if it is that there is none.
        right: none of them has to be empty for a question without an answer: [] means [""].
    """
    _check(answer, right)
    given = normalized(answer)
    return float(any(given == one for one in _right(right)))


def f1(answer: str, right: Sequence[str]) -> float:
    """The greatest F1 of the answer's words with those of a right answer, each counted as often as it occurs.

    An empty answer is worth 1 where there is none, and 0 elsewhere. Arguments as those of `exact_match`.
    """
    _check(answer, right)
    words = normalized(answer).split()
    return max(_word_f1(words, one.split()) for one in _right(right))


def _check(answer: Any, right: Any) -> None:
    if not isinstance(answer, str):
        raise TypeError(f"answer: expected a str, got {type(answer).__name__}")
    if isinstance(right, str) or not isinstance(right, Sequence) or not all(isinstance(text, str) for text in right):
        raise TypeError(f"right: expected a list of strings, got {reprlib.repr(right)}")


def _right(texts: Sequence[str]) -> list[str]:
    """Normalized; those of which nothing is left do not count, unless there is no other."""
    return [text for text in map(normalized, texts) if text] or [""]


def _word_f1(given: list[str], right: list[str]) -> float:
    if not given or not right:
        return float(given == right)
    common = (Counter(given) & Counter(right)).total()
    return 2 * common / (len(given) + len(right))
