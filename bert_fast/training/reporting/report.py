"""report.html: a run as a page that needs nothing else, from run.json and metrics.jsonl alone."""

import datetime
import importlib.util
import math
import statistics
import textwrap
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bert_fast.files import path_name, write_atomically
from bert_fast.training.observers import LEVELS, Evaluation, Observer, Plan
from bert_fast.training.reporting import plots
from bert_fast.training.reporting.formatting import count, duration, memory, number, percent
from bert_fast.training.reporting.page import Html, cards, columns, figure, notes, page, section, table, tagged
from bert_fast.training.reporting.record import RunRecord
from bert_fast.training.reporting.run_directory import RunDirectory

__all__ = ["ReportPage", "render_report", "write_report"]

_MAX_ROWS = 25  # of the table of evaluations
_MAX_VERDICT_CHARS = 80
_SECONDS_BETWEEN = 60.0  # pages that are written while a run goes on


class ReportPage(Observer):
    """Writes the page after evaluations, at most once a minute, and at the end.

    A run goes on if its page cannot be written; a warning says why.
    """

    def __init__(self, output_dir: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._output_dir = Path(path_name("output_dir", output_dir))
        self._clock = clock
        self._written: float | None = None  # None: the run has not begun

    def start(self, plan: Plan) -> None:
        """Takes the time; there is nothing to show yet."""
        self._written = self._clock() - _SECONDS_BETWEEN

    def evaluation(self, evaluation: Evaluation) -> None:
        """Writes the page, unless it was written just now."""
        if self._written is not None and self._clock() - self._written >= _SECONDS_BETWEEN:
            self._write()

    def end(self, outcome: str) -> None:
        """Writes the page of a run that had begun."""
        if self._written is not None:
            self._write()

    def _write(self) -> None:
        try:
            write_report(self._output_dir)
        except Exception as error:  # hours of training are worth more than their page
            warnings.warn(f"{self._output_dir}: report.html could not be written: {error!r}", stacklevel=2)
        self._written = self._clock()


def write_report(run_dir: str | Path) -> Path:
    """Makes a run's page again; returns its path.

    Without matplotlib the page has no curves, and says so.

    Args:
        run_dir: a run's directory; run.json and metrics.jsonl are all that is read.

    Raises:
        SourceError: the directory is no run's, or one of the two files is damaged.
    """
    directory = RunDirectory(path_name("run_dir", run_dir))
    text = render_report(RunRecord.read(directory)).encode(errors="backslashreplace")
    write_atomically(directory.report, lambda temporary: temporary.write_bytes(text))
    return directory.report


def render_report(record: RunRecord) -> str:
    """The page."""
    plan, last = record.plan, record.starts[-1]
    verdict, is_good = _verdict(record)
    sections = [cards(_cards(record)), *_figures(record)]
    if record.evaluations:
        sections.append(section("Evaluations", _evaluations(record)))
    told = [(f"step\u00a0{line['step']:,}", str(line["text"])) for line in record.of_kind("note")]
    if told:
        sections.append(section("What happened", table((), told)))
    sections.append(columns((section("Settings", _settings(plan)), section("Machine", _machine(record)))))
    sections.append(section("How to read this", notes(_explanations(record))))
    return page(
        title=f"{plan['task']}: {plan['model']}",
        text=f"{count(plan['num_parameters'])} parameters; {plan['num_examples']:,} examples, "
        f"{plan['num_valid_examples']:,} for validation; on {last['machine']['device']}; "
        f"started {_time(record.starts[0])}.",
        verdict=verdict,
        is_good=is_good,
        sections=sections,
    )


def _verdict(record: RunRecord) -> tuple[str, bool | None]:
    done = f"{_last_step(record):,} of {record.plan['steps']:,} steps"
    if record.outcome is None:
        return f"running, or killed: {done}", None
    is_whole = record.outcome in ("finished", "stopped early")
    outcome = textwrap.shorten(record.outcome, _MAX_VERDICT_CHARS, placeholder=" ...")
    return f"{outcome}: {done}", True if is_whole else False if record.outcome.startswith("failed") else None


def _last_step(record: RunRecord) -> int:
    return max((line["step"] for line in record.lines), default=0)


def _cards(record: RunRecord) -> list[tuple[str, str]]:
    steps, items = record.steps, []
    best = record.best
    if best is not None and record.metric in best["metrics"]:
        items.append((number(best["metrics"][record.metric]), f"best {record.metric}, at step {best['step']:,}"))
    if not steps:
        return [*items, ("0 steps", "so far; figures come with the first ones")]
    last = steps[-1]
    items.append((number(_total(last["losses"])), f"training loss at step {last['step']:,}"))
    speeds = record.step_curve(lambda line: line.get("tokens_per_s")).finite
    if speeds:
        shares = record.step_curve(lambda line: line.get("mfu")).finite
        used = f"; MFU {percent(statistics.median(shares))}".replace(" %", "\u00a0%") if shares else ""
        items.append((count(statistics.median(speeds)), f"tokens/s (median){used}"))
    tokens, seconds = sum(line["tokens"] for line in steps), sum(line["seconds"] for line in steps)
    items.append((duration(seconds), f"of training steps on {count(tokens)} tokens, {last['epoch']:.2f} epochs"))
    items.append((memory(last["memory_bytes"]), "of memory at most"))
    return items


def _total(losses: dict[str, float]) -> float:
    return losses["loss"] if "loss" in losses else sum(losses.values())


def _figures(record: RunRecord) -> list[Html]:
    """The curves two by two; a sentence instead where there is nothing to draw, or nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        text = "Curves are drawn by matplotlib, which is not installed: pip install bert_fast[train]"
        return [section("Curves", tagged("p", text))]
    drawings = (
        ("Loss", plots.loss_plot(record), _loss_caption(record)),
        ("Metrics", plots.metric_plot(record), f"Of validation. The best model is chosen by {record.metric}."),
        ("Speed", plots.speed_plot(record), "Tokens are those of the texts: padding is neither counted nor computed."),
        ("Learning rate and gradients", plots.schedule_plot(record), _schedule_caption(record)),
    )
    shown = [figure(title, Html(drawing), caption) for title, drawing, caption in drawings if drawing is not None]
    if not shown:
        return [section("Curves", tagged("p", "There are too few figures for curves yet."))]
    return [columns(shown)]


def _loss_caption(record: RunRecord) -> str:
    text = f"Each point is the mean over {record.plan['config'].get('log_every', 'some')} steps."
    if len(record.steps) >= plots.SMOOTH_FROM:
        text += " The strong line is a running mean of the pale one."
    broken = [line["step"] for line in record.steps if not math.isfinite(_total(line["losses"]))]
    if broken:
        text += f" Not finite at {len(broken)} of them, first at step {broken[0]:,}."
    if record.resumed_at:
        text += " Dotted: the run went on from a checkpoint."
    return text


def _schedule_caption(record: RunRecord) -> str:
    config = record.plan["config"]
    known = [f"{name} {config[name]}" for name in ("schedule", "warmup", "max_grad_norm") if name in config]
    return ", ".join(known).replace("_", " ")


def _evaluations(record: RunRecord) -> Html:
    evaluations = record.evaluations
    names = list(dict.fromkeys(["loss", *record.loss_parts, *record.metric_names]))
    names = [name for name in names if any(name in line["metrics"] for line in evaluations)]
    names.sort(key=lambda name: name != record.metric)
    stride = math.ceil(len(evaluations) / _MAX_ROWS)
    best, rows = record.best, []
    for place, line in enumerate(evaluations):
        if (len(evaluations) - 1 - place) % stride and line is not best:
            continue
        mark = tagged("span", "best", "passed") if line is best else ""
        values = (number(line["metrics"][name]) if name in line["metrics"] else "" for name in names)
        rows.append((f"{line['step']:,}", f"{line['epoch']:.2f}", *values, duration(line["seconds"]), mark))
    head = ("step", "epoch", *(name.replace("_", " ") for name in names), "time", "")
    shown = tagged("div", table(head, rows, numeric=range(len(head) - 1)), "scroll")
    if stride == 1:
        return shown
    return Html(shown + tagged("p", f"One of {stride} evaluations is shown, and the best one."))


def _settings(plan: dict[str, Any]) -> Html:
    return table((), [(name, _plain(value)) for name, value in plan["config"].items() if value is not None])


def _machine(record: RunRecord) -> Html:
    rows = []
    for place, start in enumerate(record.starts):
        what = "Started" if place == 0 else f"Went on after step {start['first_step']:,}"
        rows.append((what, _time(start)))
        if start.get("ended"):
            rows.append(("Ended", f"{_time(start, 'ended')}: {start['outcome']}"))
    last = record.starts[-1]
    machine = last["machine"]
    rows += [
        ("Device", f"{machine['device']}, {_counted(machine['processes'], 'process', 'processes')}"),
        ("Processor", f"{machine['processor']}, {_counted(machine['cores'], 'core', 'cores')}"),
        ("System", machine["system"]),
        ("Versions", ", ".join(f"{name} {version}" for name, version in last["versions"].items())),
        ("Command", tagged("code", last["command"])),
        ("In", tagged("code", last["directory"])),
    ]
    return table((), rows)


def _explanations(record: RunRecord) -> Sequence[str]:
    lines = [
        "Everything on this page comes from run.json and metrics.jsonl beside it; bert-fast report makes it again.",
        "Validation runs without dropout, training with it: its loss is the greater of the two for the same model.",
    ]
    entropy, level = (record.evaluated(name).finite for name in LEVELS)
    if entropy:
        lines.append(
            f"The dashed level {number(entropy[-1])} is the entropy of the single tokens of the training text: the "
            "loss of a model that knows how frequent each is, and looks at nothing else."
        )
    if level:
        lines.append(
            f"The dashed level {number(level[-1])} is the loss of masked words of validation for a guess that also "
            "repeats what is shown in their place: one below it looks at other words."
        )
    if record.step_curve(lambda line: line.get("mfu")).finite:
        lines.append(
            "MFU is the share of the device's dense peak, as its maker states it, that the model's matrix products on "
            "real tokens use (Chowdhery et al. 2022, arXiv:2204.02311)."
        )
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _counted(amount: int, one: str, many: str) -> str:
    return f"{amount} {one if amount == 1 else many}"


def _time(start: dict[str, Any], which: str = "time") -> str:
    return datetime.datetime.fromisoformat(start[which]).strftime("%Y-%m-%d %H:%M:%S %Z")
