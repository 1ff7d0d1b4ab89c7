import dataclasses
import html.parser
import io
import json
import math

import pytest

from bert_fast.demo import results as results_module
from bert_fast.demo import settings
from bert_fast.demo.results import DemoResults, rate, times
from bert_fast.demo.terminal import EXCERPT_CHARS, Terminal, excerpt
from bert_fast.testing.tolerances import ABSOLUTE, RELATIVE
from bert_fast.training.reporting.page import Html, page, section, table, tagged

VOID = {"meta", "br", "hr", "link", "img"}


class Checker(html.parser.HTMLParser):
    """Collects tags, text and what is loaded from elsewhere; fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    return checker


def test_everything_is_escaped_once() -> None:
    hostile = "<i>&amp;</i>"
    parts = (section(hostile, hostile), table((hostile,), [(hostile, tagged("b", hostile))]))
    checker = parse(page(hostile, hostile, hostile, True, parts))
    assert "i" not in checker.tags
    assert checker.text.count(hostile) == 9  # title, heading, badge, text; section: 2; table: 3
    assert parse(section("", Html("<i>kept</i>"))).tags == {"section", "h2", "i"}


def test_report_is_self_contained_and_escaped(demo_results: DemoResults) -> None:
    pytest.importorskip("matplotlib", reason="draws the report's plots")
    from bert_fast.demo.report import render_report

    text = render_report(demo_results)
    checker = parse(text)
    assert not {"script", "link", "img", "red"} & checker.tags
    assert not checker.loaded
    assert "url(http" not in text
    shown = " ".join(checker.text)
    assert demo_results.settings.questions[0] in shown
    for expected in (
        "all 6 checks passed",
        "starts untrained",
        "4.00×",
        "20%",
        *(row.what for row in demo_results.rows),
    ):
        assert expected in shown
    assert text.count("<svg") == 3


def test_report_says_what_failed(demo_results: DemoResults) -> None:
    pytest.importorskip("matplotlib", reason="draws the report's plots")
    from bert_fast.demo.report import render_report

    inference = dataclasses.replace(demo_results.inference, largest_difference=math.nan)
    failing = dataclasses.replace(demo_results, inference=inference)
    assert [check.found for check in failing.failed] == ["nan"]
    text = render_report(failing)
    assert "1 of 6 checks failed" in text
    assert text.count(">FAILED<") == 1


def test_checks_can_fail(demo_results: DemoResults) -> None:
    assert not demo_results.failed
    training = dataclasses.replace(demo_results.training, losses=(10.0, 9.01, 8.0))
    assert training.checks[0].passed is False
    assert dataclasses.replace(demo_results.training, losses=(10.0, math.nan, 8.0)).checks[0].passed is False
    assert dataclasses.replace(demo_results.tokenizer, first_difference="passage 0").checks[0].passed is False
    closed = dataclasses.replace(demo_results.checkpoint, same_ids=False, largest_difference=math.nan)
    assert [check.passed for check in closed.checks] == [False, False]


def test_limits_are_those_of_the_tolerance_table() -> None:
    assert ABSOLUTE["minilm_embeddings"] == settings.HIDDEN_STATES_TOLERANCE
    assert RELATIVE["training_loss_50_steps"] == settings.LOSS_TOLERANCE


def test_results_are_json_even_with_nan(demo_results: DemoResults) -> None:
    checkpoint = dataclasses.replace(demo_results.checkpoint, largest_difference=math.nan)
    stored = dataclasses.replace(demo_results, checkpoint=checkpoint).as_json()
    read = json.loads(json.dumps(stored, allow_nan=False))
    assert read["checkpoint"]["largest_difference"] is None
    assert read["training"]["losses"] == [10.0, 9.0, 8.0]
    assert read["finished"] is True


def test_terminal_takes_no_text_for_markup(demo_results: DemoResults) -> None:
    console_module = pytest.importorskip("rich.console", reason="writes to the terminal")
    stream = io.StringIO()
    terminal = Terminal(console_module.Console(file=stream, width=300))
    question = demo_results.settings.questions[0]
    terminal.heading(1, question)
    terminal.line(question)
    terminal.answers(demo_results.search.answers)
    with terminal.track(question, 2) as advance:
        advance()
    terminal.summary(demo_results)
    out = stream.getvalue()
    assert out.count(question) >= 3
    assert "[red]markup[/red]" in out
    assert "4.00×" in out


def test_excerpts_are_one_short_line() -> None:
    assert excerpt("one\n\n   two") == "one two"
    long = excerpt("word " * 100)
    assert len(long) <= EXCERPT_CHARS + 2
    assert long.endswith("word …")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(5_522_378.9, "5,520,000"), (999.6, "1,000"), (45.6, "45.6"), (1.234, "1.23"), (0.0, "0"), (353.2, "353")],
)
def test_rates_have_three_digits(value: float, shown: str) -> None:
    assert rate(value) == shown


def test_ratios() -> None:
    assert [times(value) for value in (0.5, 3.014, 9.949, 9.951, 31.7)] == ["0.50×", "3.01×", "9.95×", "10.0×", "31.7×"]
    assert results_module.megabytes(1_500_000) == "1.5"
