"""What reaches a terminal is text."""

import json

import pytest

from bert_fast.terminal import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\u001b[31mred\u001b[0m"),
        ("a\x07\x08\rb\x9b2J\x7f", r"a\u0007\u0008\u000db\u009b2J\u007f"),
        ("\u202egnirts\u2066\u200f\u2028", r"\u202egnirts\u2066\u200f\u2028"),
        ("name\udcff.txt", r"name\udcff.txt"),
        ("naïve 你好 👩‍👧 می‌خواهم \u00a0\t|\n", None),
    ],
    ids=["colours", "controls", "directions", "half a character", "text"],
)
def test_only_what_acts_is_escaped(text: str, shown: str | None) -> None:
    assert printable(text) == (text if shown is None else shown)
    printable(text).encode()
    assert json.loads(printable(json.dumps(text, ensure_ascii=False))) == text
