"""The best spans over the windows of a question, against all spans one by one."""

from pathlib import Path

import numpy as np
import pytest

from bert_fast.data.answers import best_answers, best_spans
from bert_fast.data.question_answering import QuestionAnsweringSource
from bert_fast.tokenization import BertTokenizer

RANDOM = np.random.default_rng(0)


def one_by_one(
    starts: list[np.ndarray], ends: list[np.ndarray], first: list[int], count: int, max_length: int
) -> list[tuple[int, int, float]]:
    found: dict[tuple[int, int], float] = {}
    for begin, start, end in zip(first, starts, ends, strict=True):
        for i in range(len(start)):
            for j in range(i, min(i + max_length, len(start))):
                span, score = (begin + i, begin + j), float(np.float32(start[i]) + np.float32(end[j]))
                found[span] = max(found.get(span, -np.inf), score)
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return [(*span, score) for span, score in ordered[:count]]


@pytest.mark.parametrize("max_length", [1, 2, 7, 30])
@pytest.mark.parametrize("levels", [3, 1000], ids=["ties", "no ties"])
@pytest.mark.parametrize("first", [[0], [0, 3], [0, 8], [0, 2, 9, 10]], ids=str)
def test_spans_are_the_best_of_all(first: list[int], levels: int, max_length: int) -> None:
    lengths = [9, 8, 5, 1][: len(first)]
    starts = [RANDOM.integers(0, levels, length).astype(np.float32) for length in lengths]
    ends = [RANDOM.integers(0, levels, length).astype(np.float32) for length in lengths]
    for count in (1, 5, 1000):
        spans, scores = best_spans(starts, ends, first, count=count, max_length=max_length)
        found = [(*span, score) for span, score in zip(spans.tolist(), scores.tolist(), strict=True)]
        assert found == one_by_one(starts, ends, first, count, max_length)


def test_no_span_without_tokens() -> None:
    spans, scores = best_spans([np.empty(0, np.float32)], [np.empty(0, np.float32)], [0], count=3, max_length=4)
    assert spans.shape == (0, 2) and scores.shape == (0,)


@pytest.fixture
def source(tmp_path: Path) -> QuestionAnsweringSource:
    words = ["who", "?", "john", "mary", "ran", "to", "oslo", "in", "may", "##s"]
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    rows = [
        {"id": "a", "question": "Who?", "context": "John,  Mary RAN to Oslo in Mays"},
        {"id": "b", "question": "Who?", "context": ""},
        {"id": "c", "question": "Who?", "context": "in Oslo in Oslo"},
    ]
    return QuestionAnsweringSource.read(rows, BertTokenizer(file), max_length=10, stride=2)


# a: john , mary ran to | ran to oslo in may | in may ##s; b: nothing; c: in oslo in oslo
SEQUENCES = ["C w ? S john , mary ran to S", "C w ? S ran to oslo in may S", "C w ? S in may ##s S",
             "C w ? S S", "C w ? S in oslo in oslo S"]  # fmt: skip


def scores(source: QuestionAnsweringSource, **given: dict[int, float]) -> np.ndarray:
    """Scores of -5, but where they are given by window and place."""
    lengths = source.lengths(0)
    assert lengths.tolist() == [len(sequence.split()) for sequence in SEQUENCES]
    values = [np.full(length, -5.0) for length in lengths]
    for window, places in given.items():
        for place, value in places.items():
            values[int(window[1:])][place] = value
    return np.concatenate(values)


def test_answers_are_text_of_the_context(source: QuestionAnsweringSource) -> None:
    start = scores(source, w0={6: 3.0}, w1={4: 2.0, 6: 4.0}, w2={6: 1.0}, w4={5: 1.0, 7: 2.0})
    end = scores(source, w0={7: 3.0}, w1={4: 1.0, 6: 1.0}, w2={6: 1.0}, w4={5: 1.0, 7: 1.0})
    a, b, c = best_answers(source, start, end, count=4, max_length=3)
    assert [(answer.text, answer.start, answer.score) for answer in a[:2]] == [("Mary RAN", 7, 6.0), ("Oslo", 19, 5.0)]
    assert len(a) == 4 and sum(answer.probability for answer in a) == pytest.approx(1)
    assert [answer.probability for answer in a] == sorted((answer.probability for answer in a), reverse=True)
    assert [(answer.text, answer.start) for answer in b] == [("", -1)]  # nothing else can be said
    # The better of two places of the same text, and no text twice.
    assert (c[0].text, c[0].start, c[0].score) == ("Oslo", 11, 3.0)
    assert len({answer.text for answer in c}) == len(c) >= 2


def test_questions_special_tokens_and_crossed_spans_are_no_answers(source: QuestionAnsweringSource) -> None:
    start = scores(source, w0={1: 9.0, 8: 2.0, 9: 9.0}, w1={9: 9.0})
    end = scores(source, w0={0: 9.0, 2: 9.0, 3: 9.0, 4: 9.0, 9: 9.0})
    a, *_ = best_answers(source, start, end, count=1, max_length=30)
    assert a[0].text == "John" and a[0].score == 4.0


def test_no_answer_has_to_look_so_in_every_window(source: QuestionAnsweringSource) -> None:
    start = scores(source, w0={0: 9.0, 4: 1.0}, w1={0: 3.0}, w2={0: 5.0}, w4={0: 1.0})
    end = scores(source, w0={0: 9.0, 4: 1.0}, w1={0: 1.5}, w2={0: 5.0}, w4={0: 1.0})
    a, b, c = best_answers(source, start, end, count=2, max_length=30, with_none=True)
    assert [(answer.text, answer.start, answer.score) for answer in a[:2]] == [("", -1, 4.5), ("John", 0, 2.0)]
    assert len(a) == 3 and b[0].text == "" and c[0] == ("", -1, 2.0, pytest.approx(c[0].probability))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_are_the_worst(source: QuestionAnsweringSource, value: float) -> None:
    start, end = scores(source, w0={4: 1.0}), scores(source, w0={4: 1.0, 5: value})
    a, *_ = best_answers(source, start, end, count=3, max_length=2, with_none=True)
    assert a[0].text == "John" and all(np.isfinite(answer.score) for answer in a)
    everything = np.full(len(start), value)
    for answers in best_answers(source, everything, everything, with_none=True):
        assert all(np.isfinite([answer.score, answer.probability]).all() for answer in answers)


def test_scores_may_be_of_any_precision(source: QuestionAnsweringSource) -> None:
    start = scores(source, w0={6: 3.0}).astype(np.float16)
    wide = list(best_answers(source, start.astype(np.float64), start.astype(np.float64)))
    assert wide == list(best_answers(source, start, start))
