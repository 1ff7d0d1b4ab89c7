"""What a step costs in Python does not rise, and the counting sees what it is for."""

import ast
import json

from tools import step_calls


def test_nothing_rises() -> None:
    recorded = json.loads(step_calls.RECORD.read_text(encoding="utf-8"))
    assert not step_calls.risen(step_calls.count(), recorded)


def test_what_rises_is_named() -> None:
    recorded = {"forward": {"calls": 3, "files": 2}}
    assert step_calls.risen({"forward": {"calls": 4, "files": 2}}, recorded) == [
        "forward: 4 calls, at most 3 were written down"
    ]


def test_calls_are_those_of_the_package() -> None:
    from bert_fast.reference.dropout import dropout_scale

    assert step_calls.calls_of(lambda: dropout_scale(0.1)) == {"calls": 2, "files": 1, "changes of file": 0}
    assert step_calls.calls_of(lambda: json.dumps({})) == {"calls": 0, "files": 0, "changes of file": 0}


def test_long_lists_are_those_of_eight_names() -> None:
    long, short = ", ".join("abcdefgh"), ", ".join("abcdefg")
    for text, lines in ((f"f({long})", 1), (f"f({short})", 0), (f"def f({long}): ...", 1), (f"f({short},\n h=1)", 2)):
        assert sum(map(step_calls._lines_of, ast.walk(ast.parse(text)))) == lines
