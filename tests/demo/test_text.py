import sys
from pydoc_data.topics import topics

import pytest

from bert_fast.demo.requirements import DemoError
from bert_fast.demo.text import MAX_CHARS, MIN_CHARS, python_reference, split_passages

TOPIC = """Lambdas
*******

   lambda_expr ::= "lambda" [parameter_list] ":" expression

Lambda expressions are used to create anonymous functions. For example:

   def <lambda>(parameters):
       return expression

Short one.

Another paragraph, long enough to stand alone, follows the short one here.

Next heading
============

   object.__repr__(self) is indented, as descriptions under a definition are.
"""


def test_passages_keep_examples_and_headings() -> None:
    passages = split_passages({"lambda": TOPIC})
    assert [passage.heading for passage in passages] == ["Lambdas", "Lambdas", "Next heading"]
    # Too short to stand alone, so the grammar is part of the first passage; the example belongs to its paragraph.
    first, second, third = (passage.text for passage in passages)
    assert first.startswith("lambda_expr ::=") or first.startswith("   lambda_expr")
    assert first.endswith("def <lambda>(parameters):\n       return expression")
    assert second.startswith("Short one.\n\nAnother paragraph")
    assert third.startswith("object.__repr__")


def test_shared_text_is_kept_once() -> None:
    once = split_passages({"lambda": TOPIC})
    assert split_passages({"a": TOPIC, "b": TOPIC}) == once


def test_long_paragraphs_are_cut_at_lines_and_nothing_is_lost() -> None:
    lines = [f"line {number} of a paragraph without an end" for number in range(200)]
    passages = split_passages({"long": "\n".join(lines)})
    assert len(passages) > 1
    assert all(MIN_CHARS <= len(passage.text) <= MAX_CHARS for passage in passages)
    assert "\n".join(passage.text for passage in passages).splitlines() == lines
    (only, rest) = split_passages({"one line": "x" * (MAX_CHARS + MIN_CHARS)})
    assert len(only.text + rest.text) == MAX_CHARS + MIN_CHARS


@pytest.mark.parametrize("topic", ["", "\n\n \n", "short"])
def test_nothing_to_say(topic: str) -> None:
    assert split_passages({"empty": topic}) == []


def test_the_real_text() -> None:
    passages = python_reference()
    assert len(passages) > 500
    assert len({passage.text for passage in passages}) == len(passages)
    assert all(MIN_CHARS <= len(passage.text) <= MAX_CHARS for passage in passages)
    assert any(passage.heading == "Lambdas" for passage in passages)
    # Most of the words are there; what is missing is headings, repetitions and scraps.
    words = set(" ".join(topics.values()).split())
    assert len(set(" ".join(passage.text for passage in passages).split()) & words) > 0.9 * len(words)


def test_python_without_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DemoError, match="no module pydoc_data"):
        python_reference()
