import dataclasses
import io
import math
import re
from collections.abc import Callable

import pytest

from bert_fast import terminal
from bert_fast.training.observers import Plan
from bert_fast.training.reporting import ProgressLine
from bert_fast.training.reporting.formatting import count, duration, losses, memory, number, percent

from .conftest import HOSTILE, make_evaluation, make_step


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch(plan: Plan, stream: io.StringIO, seconds_a_step: float = 1.0, **changes: object) -> ProgressLine:
    """Tells of all steps of a run, and of one evaluation."""
    clock = Clock()
    line = ProgressLine(stream, clock)
    line.start(plan)
    for step in range(plan.first_step + 1, plan.steps + 1):
        clock.now += seconds_a_step
        line.step(make_step(step, **changes))
        if step == plan.steps // 2:
            line.evaluation(make_evaluation(step))
            line.note(HOSTILE)
    line.end("finished")
    return line


def test_lines_now_and_then_where_there_is_no_terminal(plan: Plan) -> None:
    stream = io.StringIO()
    watch(plan, stream)
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert lines[0] == "pretrain: BertForPreTraining, 110M parameters, on NVIDIA H200, bf16"
    steps = [int(found[1]) for line in lines if (found := re.match(r"step (\d+)/100 ", line))]
    assert steps == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]  # ten seconds between, and the last
    assert any(line.startswith("step 50: loss 2.6000, masked_lm 2.1000, accuracy 0.7500, the best") for line in lines)
    assert HOSTILE in lines
    assert not any("unigram_entropy" in line for line in lines)
    assert lines[-1] == "finished at step 100 of 100, after 1 min 40 s; best loss 2.6000 at step 50"


def test_an_evaluation_has_a_line(plan: Plan) -> None:
    stream, clock = io.StringIO(), Clock()
    line = ProgressLine(stream, clock)
    line.evaluating(1, 4)  # of a model that is not in training
    line.start(plan)
    for done in range(1, 5):
        clock.now += 11
        line.evaluating(done, 4)
    shown = [text for text in stream.getvalue().splitlines() if "evaluating" in text]
    assert shown[0] == "step 0/100  evaluating, 25.0 % of 4 batches" and len(shown) == 4


def test_what_a_line_says(plan: Plan) -> None:
    stream = io.StringIO()
    watch(plan, stream)
    line = next(line for line in stream.getvalue().splitlines() if line.startswith("step 51/"))
    value = 2 + 8 * math.exp(-51 / 20)
    share = (16_000 * 6e8 + 1_600_000 * 1e5) / (0.1 * 989e12)
    assert line.split("  ") == [
        "step 51/100", "51 %", "epoch 1.02", f"loss {number(value + 0.5)}",
        f"(masked_lm {number(value)}, next_sentence 0.5000)", "160k tokens/s",
        f"MFU {percent(share)}", "49 s left", "2.0 GB",
    ]  # fmt: skip


def test_what_is_not_known_is_left_out(plan: Plan) -> None:
    stream = io.StringIO()
    on_cpu = dataclasses.replace(plan, device="CPU", num_processes=2)
    watch(on_cpu, stream, losses={"loss": math.nan}, seconds=0.0)
    text = stream.getvalue()
    assert "on 2 processes, CPU each" in text
    assert "MFU" not in text
    assert "tokens/s" not in text
    assert "loss nan  " in text
    assert "waiting" not in text


def test_waiting_for_data_is_said(plan: Plan) -> None:
    stream = io.StringIO()
    watch(plan, stream, wait_seconds=0.04)
    assert "40.0 % waiting for data" in stream.getvalue()


def test_a_run_that_goes_on_estimates_from_its_own_steps(plan: Plan) -> None:
    stream = io.StringIO()
    watch(dataclasses.replace(plan, first_step=80), stream, seconds_a_step=3.0)
    lines = stream.getvalue().splitlines()
    assert "57 s left" in lines[2]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_on_a_terminal_the_line_fits(plan: Plan, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    pytest.importorskip("rich", reason="draws the line")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    watch(plan, stream)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    drawn = [row.strip() for line in text.splitlines() for row in line.split("\r") if "/100" in row]
    assert len(drawn) >= 100
    assert max(map(len, drawn)) <= width
    assert all(re.match(r"(━*─*  )?step \d+/100", row) for row in drawn)
    assert ("(masked_lm" in drawn[-1]) == (width >= 120)
    assert ("loss" in drawn[-1]) == (width >= 40)
    assert ("━" in drawn[-1]) == (width == 200)  # only where there is room left
    assert HOSTILE.replace(" ", "") in re.sub(r"\s", "", text)
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")  # the cursor is back


def test_without_rich_a_terminal_gets_plain_lines(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_is_installed", lambda package: False)
    stream = Terminal()
    watch(plan, stream)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("/100  ") == 11
    assert stream.getvalue().count("pip install bert_fast[train]") == 1


def test_a_terminal_that_cannot_be_drawn_over_gets_plain_lines(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    watch(plan, stream)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("/100  ") == 11


def test_of_a_failure_before_the_start_the_error_tells() -> None:
    stream = io.StringIO()
    ProgressLine(stream).end("failed: no examples")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("shown", "value", "expected"),
    [
        (number, 2.0, "2"), (number, 0.42134, "0.4213"), (number, 12.3456, "12.35"), (number, 1234.5, "1,234"),
        (number, 3e-5, "3e-5"), (number, -1.25e-7, "-1.25e-7"), (number, 0.0, "0"), (number, math.nan, "nan"),
        (number, -math.inf, "-inf"), (number, 1e-3, "0.0010"), (number, 2e9, "2,000,000,000"),
        (count, 0, "0"), (count, 999, "999"), (count, 999.6, "1.00k"), (count, 12_345, "12.3k"),
        (count, 999_499, "999k"), (count, 999_500, "1.00M"), (count, 110_106_428, "110M"), (count, 3.2e9, "3.20G"),
        (count, 5e13, "5.00e+13"),
        (duration, 0.0, "0.0 s"), (duration, 9.94, "9.9 s"), (duration, 9.96, "10 s"), (duration, 59.6, "1 min 00 s"),
        (duration, 185, "3 min 05 s"), (duration, 3599.7, "1 h 00 min"), (duration, 7620, "2 h 07 min"),
        (duration, 86399, "1 d 00 h"), (duration, 100 * 3600, "4 d 04 h"),
        (memory, 812e6, "812 MB"), (memory, 999.6e6, "1.0 GB"), (memory, 139e9, "139.0 GB"),
        (percent, 0.4567, "45.7 %"), (percent, 1.0, "100 %"), (percent, 0.0, "0.0 %"),
    ],
)  # fmt: skip
def test_figures(shown: Callable[[float], str], value: float, expected: str) -> None:
    assert shown(value) == expected


def test_losses_in_parts() -> None:
    assert losses({"loss": 0.5}) == ("loss 0.5000", "")
    assert losses({"masked_lm": 0.5, "loss": 0.5}) == ("loss 0.5000", "")
    assert losses({"a": 0.5, "b": 1.0}) == ("loss 1.5000", "(a 0.5000, b 1)")
