"""From scores of tokens to answers, and how close these are to the right ones: the rules of SQuAD's official scripts.

Answers are the best spans over all windows of a question, as text of the original context:

    window 0 of two    context tokens 0-4     starts [0.1, 2.0, 0.3, 0.0, 0.2]    ends [0.0, 0.5, 1.8, 0.1, 0.0]
    window 1           context tokens 3-6     starts [0.2, 0.1, 0.4, 0.0]         ends [0.0, 0.1, 0.3, 0.2]

The span of tokens 1 to 2 scores 2.0 + 1.8, which is the best; a span in both windows has the greater of two scores.
Every span of at most so many tokens is looked at, not only those between the best starts and ends.

Both measures, `exact_match` and `f1`, look at what is left of a text without upper case, ASCII punctuation, the
articles "a", "an" and "the", and spaces at its ends: "The  Panthers!" is "panthers". They do not know where words end
in text without spaces: an answer in Chinese is one word, right or wrong as a whole.

Source: Rajpurkar et al. 2016 (arXiv:1606.05250), section 6.1; Rajpurkar et al. 2018 (arXiv:1806.03822) for questions
without an answer.
"""

import re
import reprlib
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_fast.checks import check_count, check_flag
from bert_fast.data.arguments import sequence_of, whole_numbers
from bert_fast.data.question_answering import QuestionAnsweringSource

__all__ = ["Answer", "best_answers", "best_spans", "exact_match", "f1", "normalized"]

_WORST = -1e30  # in place of what is no number; two of them added are still one
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Answer(NamedTuple):
    """A possible answer.

    text: "" where there is none. start: its first character in the context; -1 where there is none. score: of its first
    token as start and its last as end, added. probability: its share among the possible answers of a question.
    """

    text: str
    start: int
    score: float
    probability: float


def best_answers(
    source: QuestionAnsweringSource,
    start_scores: np.ndarray,
    end_scores: np.ndarray,
    *,
    count: int = 20,
    max_length: int = 30,
    with_none: bool = False,
) -> Iterator[list[Answer]]:
    """The best answers to every question, best first; no text twice, and at least one answer.

    Args:
        source: the questions and their windows.
        start_scores (float [N]): of every token of all windows, in their order, to be an answer's first token.
        end_scores (float [N]): likewise, to be its last.
        count: at most so many texts.
        max_length: most tokens of an answer.
        with_none: that there is no answer is among the possible ones, beyond `count`. Its score is that of [CLS] as
            start and end, the least of all windows: it has to look so in each of them.

    Yields:
        the answers to one question after the other. Scores that are NaN or infinite count as the worst.
    """
    if not isinstance(source, QuestionAnsweringSource):
        raise TypeError(f"source: expected a QuestionAnsweringSource, got {type(source).__name__}")
    check_flag("with_none", with_none)
    windows, lengths = source.windows, source.lengths(0)
    begins = np.cumsum(lengths, dtype=np.int64) - lengths
    num_tokens = int(lengths.sum(dtype=np.int64))
    for name, scores in (("start_scores", start_scores), ("end_scores", end_scores)):
        _check_scores(name, scores)
        if len(scores) != num_tokens:
            raise ValueError(f"{name}: expected {num_tokens}, one for each token of all windows, got {len(scores)}")
    start_scores, end_scores = _finite(start_scores), _finite(end_scores)
    none_scores = start_scores[begins] + end_scores[begins]
    tokens = begins + windows.offset
    bounds = np.searchsorted(windows.question, np.arange(source.num_questions + 1))
    for question, context in enumerate(source.questions.context_of.tolist()):
        own = slice(bounds[question], bounds[question + 1])
        parts = [slice(begin, begin + length) for begin, length in zip(tokens[own], windows.length[own], strict=True)]
        spans, scores = best_spans(
            [start_scores[part] for part in parts], [end_scores[part] for part in parts], windows.first[own],
            count=count, max_length=max_length,
        )  # fmt: skip
        places = source.context_spans[source.context_tokens[context] + spans]
        text = source.questions.contexts[context]
        found: dict[str, tuple[int, float]] = {}
        for start, stop, score in zip(places[:, 0, 0].tolist(), places[:, 1, 1].tolist(), scores.tolist(), strict=True):
            answer = text[start:stop].lstrip()  # a Unigram token may take the space in front of it along
            if answer:
                found.setdefault(answer.rstrip(), (stop - len(answer), score))
        if with_none or not found:
            found[""] = (-1, float(none_scores[own].min()))
        yield _ranked(found)


def best_spans(
    starts: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    first: Sequence[int] | np.ndarray,
    *,
    count: int,
    max_length: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The best spans of tokens of one context, over several windows.

    Args:
        starts: for every window the scores of its context tokens (float [n]) as first token of a span.
        ends: likewise, as last token.
        first: the number, in the context, of each window's first token.
        count: how many spans; fewer where there are not so many.
        max_length: most tokens of a span.

    Returns:
        spans (int64 [k, 2]): first and last token, best span first; of equal ones that which begins first, then the
            shorter one.
        scores (fp32 [k]): start and end added; where windows share a span, the greatest.
    """
    count, max_length = check_count("count", count, 1), check_count("max_length", max_length, 1)
    _check_windows(starts, ends, first)
    num_tokens = max(begin + len(scores) for begin, scores in zip(first, starts, strict=True))
    max_length = min(max_length, max(num_tokens, 1))
    band = np.full((num_tokens, max_length), -np.inf, dtype=np.float32)  # [first token, tokens of the span - 1]
    for begin, start, end in zip(first, starts, ends, strict=True):
        if len(start):
            reach = np.concatenate([end, np.full(max_length - 1, -np.inf, dtype=end.dtype)])
            scores = start[:, None] + np.lib.stride_tricks.sliding_window_view(reach, max_length)
            part = band[begin : begin + len(start)]
            np.maximum(part, scores, out=part)
    flat = band.ravel()
    candidates = np.flatnonzero(flat > -np.inf)
    if len(candidates) > count:
        least = -np.partition(-flat[candidates], count - 1)[count - 1]
        candidates = candidates[flat[candidates] >= least]
    best = candidates[np.argsort(-flat[candidates], kind="stable")][:count]
    begin, more = np.divmod(best, max_length)
    return np.column_stack([begin, begin + more]), flat[best]


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
    _check_answers(answer, right)
    given = normalized(answer)
    return float(any(given == one for one in _right(right)))


def f1(answer: str, right: Sequence[str]) -> float:
    """The greatest F1 of the answer's words with those of a right answer, each counted as often as it occurs.

    An empty answer is worth 1 where there is none, and 0 elsewhere. Arguments as those of `exact_match`.
    """
    _check_answers(answer, right)
    words = normalized(answer).split()
    return max(_word_f1(words, one.split()) for one in _right(right))


def _check_scores(name: str, scores: Any) -> None:
    if not isinstance(scores, np.ndarray) or scores.ndim != 1 or scores.dtype.kind not in "fiu":
        is_array = isinstance(scores, np.ndarray)
        got = f"{scores.dtype} {list(scores.shape)}" if is_array else type(scores).__name__
        raise TypeError(f"{name}: expected an array of numbers [n], got {got}")


def _check_windows(starts: Any, ends: Any, first: Any) -> None:
    starts, ends = sequence_of("starts", starts), sequence_of("ends", ends)
    begins = whole_numbers("first", first)
    for name, values in (("ends", ends), ("first", begins)):
        if not len(values) == len(starts) > 0:
            raise ValueError(f"{name}: expected one for each of {len(starts)} windows, of 1 or more, got {len(values)}")
    for window, (start, end) in enumerate(zip(starts, ends, strict=True)):
        _check_scores(f"starts[{window}]", start)
        _check_scores(f"ends[{window}]", end)
        if len(start) != len(end):
            raise ValueError(f"ends[{window}]: expected {len(start)} scores, as in starts, got {len(end)}")
    if begins.min() < 0:
        raise ValueError(f"first: expected numbers from 0 on, got {begins.min()}")


def _finite(scores: np.ndarray) -> np.ndarray:
    scores = scores.astype(np.float32)
    return np.where(np.isfinite(scores), scores, np.float32(_WORST))


def _ranked(found: dict[str, tuple[int, float]]) -> list[Answer]:
    """Answers with their share of the softmax over scores, best first."""
    scores = np.array([score for _, score in found.values()], dtype=np.float64)
    weights = np.exp(scores - scores.max())
    shares = (weights / weights.sum()).tolist()
    answers = [
        Answer(text, start, score, share) for (text, (start, score)), share in zip(found.items(), shares, strict=True)
    ]
    return sorted(answers, key=lambda answer: -answer.score)


def _check_answers(answer: Any, right: Any) -> None:
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
