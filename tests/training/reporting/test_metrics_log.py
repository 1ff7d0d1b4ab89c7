import dataclasses
import json
import math
from pathlib import Path

import pytest

from bert_fast.errors import SourceError
from bert_fast.training.observers import Plan
from bert_fast.training.reporting import MetricsLog, read_metrics

from .conftest import make_evaluation, make_step


@pytest.fixture
def log(tmp_path: Path) -> MetricsLog:
    return MetricsLog(tmp_path / "deep" / "metrics.jsonl")


def record(log: MetricsLog, plan: Plan, steps: list[int], outcome: str | None = None) -> None:
    log.start(plan)
    for step in steps:
        log.step(make_step(step))
        if step % 20 == 0:
            log.evaluation(make_evaluation(step))
            log.checkpoint(step, Path(f"checkpoints/step-{step:08d}"))
    if outcome is not None:
        log.end(outcome)


def seen(log: MetricsLog) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in read_metrics(log.path)]


def test_lines_hold_the_events(log: MetricsLog, plan: Plan) -> None:
    record(log, plan, [10, 20], "finished")
    lines = read_metrics(log.path)
    assert seen(log) == [
        ("start", 0), ("step", 10), ("step", 20), ("evaluation", 20), ("checkpoint", 20), ("end", 20),
    ]  # fmt: skip
    step = make_step(10)
    assert {name: lines[1][name] for name in dataclasses.asdict(step)} == dataclasses.asdict(step)
    assert lines[1]["tokens_per_s"] == step.tokens / step.seconds
    assert 0 < lines[1]["mfu"] < 1
    assert lines[3]["metrics"] == make_evaluation(20).metrics
    assert lines[3]["is_best"] is True
    assert lines[-1]["outcome"] == "finished"
    assert all(isinstance(line["time"], float) for line in lines)


def test_lines_are_there_at_once(log: MetricsLog, plan: Plan) -> None:
    log.start(plan)
    log.step(make_step(10))
    assert seen(log) == [("start", 0), ("step", 10)]  # nobody closed the file
    log.note("ζ — 日本")
    assert read_metrics(log.path)[-1]["text"] == "ζ — 日本"


def test_a_run_that_goes_on_drops_what_it_does_again(log: MetricsLog, plan: Plan) -> None:
    record(log, plan, [10, 20, 30, 40], "interrupted")
    record(MetricsLog(log.path), dataclasses.replace(plan, first_step=20), [30, 40], "finished")
    assert seen(log) == [
        ("start", 0), ("step", 10), ("step", 20), ("evaluation", 20), ("checkpoint", 20),
        ("start", 20), ("step", 30), ("step", 40), ("evaluation", 40), ("checkpoint", 40), ("end", 40),
    ]  # fmt: skip


def test_a_run_from_the_beginning_starts_anew(log: MetricsLog, plan: Plan) -> None:
    record(log, plan, [10, 20], "interrupted")
    record(MetricsLog(log.path), plan, [10])
    assert seen(log) == [("start", 0), ("step", 10)]


def test_going_on_without_a_file(log: MetricsLog, plan: Plan) -> None:
    record(log, dataclasses.replace(plan, first_step=20), [30])
    assert seen(log) == [("start", 20), ("step", 30)]


def test_a_cut_last_line_is_left_out_and_the_run_goes_on(log: MetricsLog, plan: Plan) -> None:
    record(log, plan, [10, 20])
    whole = log.path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for size in range(last + 1, len(whole) - 1, 7):
        log.path.write_bytes(whole[:size])
        assert seen(log)[-1] == ("evaluation", 20)
    log.path.write_bytes(whole[:-30])
    record(MetricsLog(log.path), dataclasses.replace(plan, first_step=20), [30])
    assert seen(log)[-3:] == [("evaluation", 20), ("start", 20), ("step", 30)]


@pytest.mark.parametrize("damage", [b"{broken\n", b"[1, 2]\n", b'"text"\n', b'{"kind": "step"}\n', b"\xff\xfe\n"])
def test_damage_before_the_end_is_an_error_that_names_the_line(log: MetricsLog, plan: Plan, damage: bytes) -> None:
    record(log, plan, [10])
    whole = log.path.read_bytes()
    first = whole.index(b"\n") + 1
    log.path.write_bytes(whole[:first] + damage + whole[first:])
    with pytest.raises(SourceError, match=r"metrics\.jsonl: line 2: "):
        read_metrics(log.path)
    with pytest.raises(SourceError, match="line 2"):
        MetricsLog(log.path).start(dataclasses.replace(plan, first_step=10))
    assert log.path.read_bytes().count(b"\n") == 3  # as it was


def test_what_json_does_not_have_is_null(log: MetricsLog, plan: Plan) -> None:
    log.start(plan)
    log.step(make_step(1, losses={"loss": math.nan}, grad_norm=math.inf, seconds=0.0))
    log.evaluation(make_evaluation(1, accuracy=math.nan))
    text = log.path.read_text(encoding="utf-8")
    assert "NaN" not in text
    assert "Infinity" not in text
    raw = json.loads(text.splitlines()[1])
    assert raw["losses"] == {"loss": None}
    _, step, evaluation = read_metrics(log.path)
    assert math.isnan(step["losses"]["loss"])
    assert step["grad_norm"] is None
    assert step["tokens_per_s"] is None
    assert step["mfu"] is None
    assert math.isnan(evaluation["metrics"]["accuracy"])


def test_notes_and_ends_without_a_start_do_no_harm(log: MetricsLog) -> None:
    log.note("early")
    log.end("failed: nothing happened")
    assert not log.path.exists()
    with pytest.raises(SourceError, match=r"metrics\.jsonl"):
        read_metrics(log.path)
