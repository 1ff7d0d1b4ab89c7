import dataclasses
import html.parser
import json
import math
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from bert_fast.errors import SourceError
from bert_fast.training.observers import Evaluation, Plan, Step
from bert_fast.training.reporting import MetricsLog, ReportPage, RunDirectory, write_report
from bert_fast.training.reporting.drawing import MAIN
from bert_fast.training.reporting.plots import schedule_plot
from bert_fast.training.reporting.record import Curve, RunRecord, smoothed

from .conftest import HOSTILE, make_evaluation, make_step

VOID = {"meta", "br", "hr", "link", "img"}
Record = Callable[..., RunDirectory]


class Page(html.parser.HTMLParser):
    """A page that nests well: its text by sections, tags, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.loaded: list[str] = []
        self.text: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if "style" not in self.open:
            self.text.append(data.strip())

    @property
    def words(self) -> str:
        return " ".join(filter(None, self.text))


def page_of(run: RunDirectory) -> Page:
    assert write_report(run.path) == run.report
    text = run.report.read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "red"} & page.tags
    assert not page.loaded
    assert "url(http" not in text
    assert "@import" not in text
    return page


def many(count: int, **changes: object) -> list[Step]:
    return [make_step(step, **changes) for step in range(1, count + 1)]


@pytest.fixture(autouse=True)
def _no_warnings() -> None:
    pytest.importorskip("matplotlib", reason="draws the curves")
    warnings.simplefilter("error")  # means of nothing, axes without a range


def test_a_whole_run(record_run: Record) -> None:
    evaluations = (make_evaluation(50), make_evaluation(100, loss=2.4, accuracy=0.9))
    run = record_run(many(100), evaluations)
    page = page_of(run)
    assert page.headings == [
        "Loss", "Metrics", "Speed", "Learning rate and gradients", "Evaluations", "What happened", "Settings",
        "Machine", "How to read this",
    ]  # fmt: skip
    for expected in (
        "pretrain: BertForPreTraining", "finished: 100 of 100 steps", "2.4000", "best loss, at step 100", "160k",
        "masked_lm", "next_sentence", "word frequencies", "MFU", "1.60M", "learning_rate", "0.0001", "0.9, 0.999",
        "tokens/s", "NVIDIA H200", HOSTILE, "accuracy", "0.7500", "best",
    ):  # fmt: skip
        assert expected in page.words, expected
    assert "running mean" in page.words
    assert page.words.count(" best ") >= 2  # the card, and one row of the table
    assert "seed" not in page.words  # None: not a setting
    assert run.report.stat().st_size < 400_000


def test_the_same_run_gives_the_same_page(record_run: Record) -> None:
    run = record_run(many(30), (make_evaluation(30),))
    page_of(run)
    first = run.report.read_bytes()
    page_of(run)
    assert run.report.read_bytes() == first


NAN = {"masked_lm": math.nan, "next_sentence": 0.5, "loss": math.nan}
ALL_NAN = {"loss": math.nan}
CASES: dict[str, tuple[list[Step], tuple[Evaluation, ...], list[str]]] = {
    "nothing yet": ([], (), ["Curves"]),
    "one step": (many(1), (), ["Curves"]),
    "one step, one evaluation": (many(1), (make_evaluation(1),), ["Curves", "Evaluations"]),
    "two steps": (many(2), (), ["Loss", "Speed", "Learning rate and gradients"]),
    "evaluations only": (
        [], (make_evaluation(1), make_evaluation(2)), ["Metrics", "Evaluations"],
    ),
    "one evaluation": (many(9), (make_evaluation(9),), ["Loss", "Speed", "Learning rate and gradients", "Evaluations"]),
    "never finite": (
        many(50, losses=ALL_NAN, grad_norm=math.nan), (), ["Speed", "Learning rate and gradients"],
    ),
    "no longer finite": (
        [*many(60), *(make_step(step, losses=NAN) for step in range(61, 101))], (make_evaluation(80, loss=math.nan),),
        ["Loss", "Speed", "Learning rate and gradients", "Evaluations"],
    ),
    "no time, no room": (many(5, seconds=0.0, capacity_tokens=0), (), ["Loss", "Learning rate and gradients"]),
    "metrics that come and go": (
        many(5), (make_evaluation(1), Evaluation(3, 0.1), make_evaluation(5, other=math.inf)),
        ["Loss", "Metrics", "Speed", "Learning rate and gradients", "Evaluations"],
    ),
    "one part": (
        many(5, losses={"masked_lm": 2.0, "loss": 2.0}, grad_norm=None), (),
        ["Loss", "Speed", "Learning rate and gradients"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("outcome", [None, "failed: " + HOSTILE * 10])
def test_sane_whatever_is_there(record_run: Record, case: str, outcome: str | None) -> None:
    steps, evaluations, headings = CASES[case]
    page = page_of(record_run(steps, evaluations, outcome, device="CPU"))
    assert page.headings == [*headings, "What happened", "Settings", "Machine", "How to read this"]
    assert ("running, or killed" in page.words) == (outcome is None)
    assert "MFU" not in page.words
    assert ("too few" in page.words) == ("Curves" in headings)
    assert ("Not finite" in page.words) == ("longer" in case)


def test_a_run_that_went_on(record_run: Record) -> None:
    record_run(many(20), (), None)
    run = record_run([make_step(step) for step in range(11, 31)], (), "stopped early", first_step=10)
    page = page_of(run)
    record = RunRecord.read(run)
    assert [line["step"] for line in record.steps] == list(range(1, 31))
    assert record.resumed_at == [10]
    assert "Went on after step 10" in page.words
    assert "stopped early: 30 of 100 steps" in page.words


def test_without_matplotlib_the_page_says_so(record_run: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    page = page_of(record_run(many(20), (make_evaluation(20),)))
    assert "pip install bert_fast[train]" in page.words
    assert "svg" not in page.tags
    assert "Evaluations" in page.headings


def test_many_evaluations_are_shown_in_part(record_run: Record) -> None:
    evaluations = tuple(make_evaluation(step, is_best=step == 33, loss=step / 8) for step in range(1, 101))
    page = page_of(record_run(many(100), evaluations))
    assert "One of 4 evaluations" in page.words
    assert "4.1250" in page.words  # the best
    assert "12.50" in page.words  # the last


def test_a_long_run_stays_small(record_run: Record) -> None:
    run = record_run(many(5000))
    page_of(run)
    assert run.report.stat().st_size < 300_000


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_damaged_files_are_named_and_an_old_page_stays(record_run: Record, name: str) -> None:
    run = record_run(many(3))
    page_of(run)
    before = run.report.read_bytes()
    (run.path / name).write_bytes(b"{\n{\n")
    with pytest.raises(SourceError, match=re.escape(name)):
        write_report(run.path)
    assert run.report.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "metrics.jsonl",
            '"step": 2',
            '"step": "2"',
            r"metrics\.jsonl: line 3: step: expected a whole number from 0 on",
        ),
        (
            "metrics.jsonl",
            '"losses": {',
            '"losses": {"x": [], ',
            "step at step 1: losses: expected numbers by name, got",
        ),
        ("metrics.jsonl", '"tokens": ', '"tokens": 1e999, "t": ', "step at step 1: tokens: expected a number, got inf"),
        ("metrics.jsonl", '"kind": "step"', '"kind": ["step"]', r"\['step'\] at step 1: kind: expected a text"),
        ("metrics.jsonl", '"is_best": ', '"was_best": ', "evaluation at step 3: is_best: is missing"),
        ("run.json", '"steps": ', '"steps": true, "s": ', r"run\.json: plan: steps: expected a whole number, got True"),
        ("run.json", '"config": {', '"config": 3, "c": {', r"run\.json: plan: config: expected an object, got 3"),
        ("run.json", '"time": "', '"time": "x', r"run\.json: starts\[0\]: time: expected a time, got 'x"),
        ("run.json", '"machine": {', '"machine": {}, "m": {', r"run\.json: starts\[0\]: device: is missing"),
        ("run.json", '"starts": [', '"starts": [3, ', r"run\.json: cannot be read: starts: expected a list of objects"),
    ],
)
def test_fields_of_another_kind_are_named(record_run: Record, name: str, old: str, new: str, message: str) -> None:
    run = record_run(many(3), (make_evaluation(3),))
    text = (run.path / name).read_text()
    assert old in text
    (run.path / name).write_text(text.replace(old, new, 1))
    with pytest.raises(SourceError, match=message):
        write_report(run.path)


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="expected the directory of a run"):
        write_report(tmp_path)


def test_the_page_is_written_now_and_then_and_its_failure_stops_nothing(record_run: Record, plan: Plan) -> None:
    run = record_run(many(3), (), None)
    times = iter([0.0, 1.0, 2.0, 30.0, 90.0, 91.0, 100.0])
    page = ReportPage(run.path, clock=lambda: next(times))
    page.evaluation(make_evaluation(1))  # of a run that has not begun
    assert not run.report.exists()
    page.start(plan)  # 0
    page.evaluation(make_evaluation(1))  # 1, 2
    run.report.unlink()
    page.evaluation(make_evaluation(2))  # 30: too soon
    assert not run.report.exists()
    page.evaluation(make_evaluation(3))  # 90, 91
    assert run.report.exists()
    run.run_json.write_text("{", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"report\.html could not be written.*run\.json"):
        page.end("finished")


def test_smoothing_is_a_mean_without_delay() -> None:
    line = Curve(tuple(range(100)), tuple(float(value) for value in range(100)))
    inner = smoothed(line, 5).values[:94]
    assert inner == line.values[:94]  # a straight line stays, from its first point on
    assert smoothed(line, 5).values[-1] == sum(range(94, 100)) / 6
    broken = Curve((1, 2, 3), (1.0, math.nan, 3.0))
    values = smoothed(broken, 1).values
    assert math.isnan(values[1])
    assert (values[0], values[2]) == (1.0, 3.0)


@pytest.mark.parametrize("length", [2, 39, 40, 600, 1200, 12_345, 200_000])
def test_a_curve_of_any_length_is_small_and_whole(length: int) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    norms = [2.0 + math.sin(step * step) if step != length // 2 else math.nan for step in range(length)]
    lines = [
        {"kind": "step", "step": step, "learning_rate": 1e-4, "grad_norm": norm} for step, norm in enumerate(norms, 1)
    ]
    drawing = schedule_plot(RunRecord({"config": {}}, [], lines))
    assert drawing is not None and len(drawing) < 150_000
    places = [
        float(place)
        for path in re.findall(rf'd="([^"]*)"[^>]*stroke: {MAIN}', drawing)
        for place in re.findall(r"[ML] ([\d.]+) ", path)
    ]
    width = float(re.findall(r'viewBox="0 0 ([\d.]+)', drawing)[0])
    assert max(places) > 0.9 * width > 0.6 * width > min(places)


def test_the_page_reads_no_more_than_two_files(record_run: Record) -> None:
    run = record_run(many(3))
    for path in run.path.iterdir():
        if path.name not in {"run.json", "metrics.jsonl"}:
            path.unlink()
    page_of(run)
    stored = json.loads(run.run_json.read_text(encoding="utf-8"))
    assert stored["plan"]["model"] in run.report.read_text(encoding="utf-8")


def test_names_that_are_not_utf8(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "caf\udce9.txt"  # Latin-1, as Python reads it from the file system
    monkeypatch.setattr(sys, "orig_argv", ["bert-fast", "pretrain", "--train", name])
    run = RunDirectory(plan.output_dir)
    log = MetricsLog(run.metrics)
    for observer in (run, log):
        observer.start(dataclasses.replace(plan, config={"train": name}))
        observer.note(f"reading {name}")
        observer.checkpoint(0, plan.output_dir / name)
    assert name in run.read()["starts"][0]["command"]
    log.start(dataclasses.replace(plan, first_step=1))
    assert RunRecord.read(run).of_kind("note")[0]["text"] == f"reading {name}"
    assert "caf\\udce9.txt" in page_of(run).words
