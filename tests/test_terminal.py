"""What reaches a terminal is text; the line that says how far something is."""

import io
import json

import pytest

from bert_fast.terminal import Part, StatusLine, printable


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


class Terminal(io.StringIO):
    """A stream that can be drawn over."""

    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_a_line_comes_now_and_then() -> None:
    stream, now = io.StringIO(), [0.0]
    line = StatusLine(stream, clock=lambda: now[0])
    line.open()
    for number, now[0] in enumerate((0.0, 1.0, 11.0, 12.0)):
        line.show([Part(f"{number}\x1b", 0)], 0.5, "plain\x1b" if number == 2 else "")
    line.close()
    assert stream.getvalue() == "0\\u001b\nplain\\u001b\n"


def test_on_a_terminal_it_is_drawn_over_and_wiped_away(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="draws over the line")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    line = StatusLine(stream, is_transient=True)
    line.open()
    line.show([Part("what it does", 0), Part("more than there is room for", 2), Part("50%", 1)], 0.5)
    line.close()
    shown = stream.getvalue()
    assert "what it does  50%" in shown and "room" not in shown and shown.endswith("\x1b[2K")
