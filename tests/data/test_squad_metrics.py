"""Exact match and F1 of answers, by hand."""

import pytest

from bert_fast.data.answers import exact_match, f1, normalized


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Panthers", "panthers"),
        ("  the\tthe  An a ", ""),
        ("Theatre and a banana", "theatre and banana"),
        ("$1,234.50", "123450"),
        ("it's  well-known", "its wellknown"),
        ("a-b", "ab"),  # punctuation goes first, so that this "a" is no article
        ("黑豹队 ，", "黑豹队 ，"),  # punctuation of other scripts stays
        ("ÉTÉ", "été"),
        ("", ""),
    ],
)
def test_what_of_an_answer_counts(text: str, expected: str) -> None:
    assert normalized(text) == expected


@pytest.mark.parametrize(
    ("answer", "right", "exact", "score"),
    [
        ("308", ["308"], 1, 1),
        ("the 308 points", ["308"], 0, 2 / 3),  # one of two words, and the only one
        ("Denver Broncos", ["Carolina Panthers"], 0, 0),
        ("Pro Bowl pro", ["the Pro Bowl"], 0, 4 / 5),  # "pro" is counted once: 2 of 3, and 2 of 2
        ("in new york city", ["York", "New York City!"], 0, 6 / 7),  # the better of two
        ("", ["308"], 0, 0),
        ("", [], 1, 1),  # there is no answer
        ("308", [], 0, 0),
        ("308", [""], 0, 0),
        ("the", ["a"], 1, 1),  # nothing is left of either: taken for no answer
        ("the", ["a", "b"], 0, 0),
        ("卡万·肖特", ["卡万·肖特"], 1, 1),
        ("肖特", ["卡万·肖特"], 0, 0),
    ],
)
def test_answers_by_hand(answer: str, right: list[str], exact: float, score: float) -> None:
    assert exact_match(answer, right) == exact
    assert f1(answer, right) == pytest.approx(score)


@pytest.mark.parametrize("measure", [exact_match, f1])
def test_order_of_right_answers_does_not_matter(measure) -> None:
    right = ["one two", "two three four", "the"]
    for answer in ("two", "three four", "one two", "", "five"):
        assert measure(answer, right) == measure(answer, right[::-1]) == max(
            measure(answer, [one]) for one in right[:2]
        )  # fmt: skip
