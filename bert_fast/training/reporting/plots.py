"""The curves of a run, each drawing as SVG text; None where there is nothing to see."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bert_fast.training.observers import LEVELS
from bert_fast.training.reporting.drawing import BAD, MAIN, SECOND, SOFT, svg
from bert_fast.training.reporting.record import Curve, RunRecord, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter

__all__ = ["SMOOTH_FROM", "loss_plot", "metric_plot", "schedule_plot", "speed_plot"]

_WIDTH, _HEIGHT = 5.3, 4.4  # inches; all alike, since they stand side by side
SMOOTH_FROM = 40  # points: fewer are drawn as they are
_REACH = 0.02  # of the points of a curve, to each side of one
_MARKED_UP_TO = 25  # points that are drawn as dots, too
_MAX_PANELS = 4
_LEAST_SPAN = 0.05  # of the greatest value, that a vertical axis covers


@dataclass
class _Panel:
    """One pair of axes: curves with their names, and levels to compare with.

    curves: (name, curve, colour). A name is shown only where there are several things to tell apart.
    foot: the vertical axis begins at 0. is_share: figures from 0 to 1, shown in per cent.
    """

    title: str
    curves: list[tuple[str, Curve, str]]
    levels: list[tuple[str, float]] = field(default_factory=list)
    smooth: bool = False
    foot: bool = False
    is_share: bool = False

    @property
    def names(self) -> list[str]:
        """Of what is drawn."""
        return [name for name, curve, _ in self.curves if curve.finite] + [name for name, _ in self.levels]

    @property
    def is_drawable(self) -> bool:
        return any(curve.is_drawable for _, curve, _ in self.curves)


def loss_plot(record: RunRecord) -> str | None:
    """A panel for each part of the loss: training, validation, and what knowing no more than word frequencies gives."""
    panels = []
    parts = record.loss_parts
    for part in parts:
        curves = [("training", record.loss(part), MAIN), ("validation", record.evaluated(part), SECOND)]
        levels = []
        for name, words in LEVELS.items():
            level = record.evaluated(name).finite
            if level and (part == "masked_lm" or len(parts) == 1):
                levels.append((words, level[-1]))
        panels.append(_Panel("" if len(parts) == 1 else part, curves, levels, smooth=True))
    return _drawn(panels, record)


def metric_plot(record: RunRecord) -> str | None:
    """A panel for each metric of the evaluations, the one that counts first."""
    names = [name for name in record.metric_names if record.evaluated(name).is_drawable][:_MAX_PANELS]
    return _drawn([_Panel(name, [("", record.evaluated(name), SECOND)]) for name in names], record)


def speed_plot(record: RunRecord) -> str | None:
    """Tokens a second, MFU where it is known, and how full the batches were."""
    speed = record.step_curve(lambda line: line.get("tokens_per_s"))
    share = record.step_curve(lambda line: line.get("mfu"))
    fill = record.step_curve(lambda line: line["tokens"] / line["capacity_tokens"] if line["capacity_tokens"] else None)
    wait = record.step_curve(lambda line: line["wait_seconds"] / line["seconds"] if line["seconds"] else None)
    panels = [
        _Panel("tokens/s", [("", speed, MAIN)], smooth=True, foot=True),
        _Panel("MFU", [("", share, MAIN)], smooth=True, foot=True, is_share=True),
        _Panel(_fill_title(record), [("", fill, MAIN)], is_share=True),
    ]
    if wait.finite and max(wait.finite) > 0.05:
        panels.append(_Panel("time spent waiting for data", [("", wait, BAD)], foot=True, is_share=True))
    return _drawn(panels, record)


def _fill_title(record: RunRecord) -> str:
    """What `capacity_tokens` is: the budget of a batch, or what padding to its longest would make of it."""
    has_budget = record.plan["config"].get("batch_tokens") is not None
    return "share of the budget of tokens that is used" if has_budget else "share of tokens, were batches padded"


def schedule_plot(record: RunRecord) -> str | None:
    """The learning rate and the norm of the gradients."""
    rate = record.step_curve(lambda line: line["learning_rate"])
    norm = record.step_curve(lambda line: line["grad_norm"])
    panels = [
        _Panel("learning rate", [("", rate, MAIN)], foot=True),
        _Panel("norm of the gradients, before clipping", [("", norm, MAIN)], smooth=True, foot=True),
    ]
    return _drawn(panels, record)


def _drawn(panels: Sequence[_Panel], record: RunRecord) -> str | None:
    shown = [panel for panel in panels if panel.is_drawable]
    if not shown:
        return None

    def draw(figure: "Figure") -> None:
        rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        explained: set[str] = set()
        for axes, panel in zip(rows, shown, strict=True):
            _draw(axes, panel, record.resumed_at)
            if len(panel.names) > 1 and not explained.issuperset(panel.names):
                # beside the title, where it hides nothing
                axes.legend(
                    loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderaxespad=0.2, columnspacing=1.2,
                    handlelength=1.6, frameon=False, fontsize=8.5,
                )  # fmt: skip
                explained.update(panel.names)
        rows[-1].set_xlim(0, None)
        rows[-1].xaxis.set_major_formatter(_ticks(rows[-1].get_xlim()[1]))
        rows[-1].set_xlabel("step")
        rows[-1].xaxis.get_major_locator().set_params(integer=True)

    return svg(draw, _WIDTH, _HEIGHT)


def _draw(axes: "Axes", panel: _Panel, resumed_at: Sequence[int]) -> None:
    for name, curve, color in panel.curves:
        _line(axes, curve, color, name, panel.smooth)
    for name, level in panel.levels:
        axes.axhline(level, color=SOFT, linewidth=1, linestyle="--", label=name)
    for step in resumed_at:
        axes.axvline(step, color=SOFT, linewidth=0.8, linestyle=":")
    axes.set_title(panel.title)
    axes.grid(axis="y")
    axes.margins(x=0.02)
    if panel.foot:
        axes.set_ylim(0, None)
    else:
        _widen(axes, panel.is_share)
    axes.yaxis.set_major_formatter(_ticks(axes.get_ylim()[1], panel.is_share))


def _widen(axes: "Axes", is_share: bool) -> None:
    """Where values hardly differ, more room, so that what is nothing does not look like much; none above 100 %."""
    low, high = axes.get_ylim()
    missing = max(0.0, _LEAST_SPAN * max(abs(low), abs(high)) - (high - low))
    if is_share and high + missing / 2 > 1:
        axes.set_ylim(low - missing, min(high, 1.005))
    elif missing:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def _ticks(high: float, is_share: bool = False) -> "Formatter":
    """How the marks of an axis up to `high` are written."""
    from matplotlib.ticker import EngFormatter, PercentFormatter, StrMethodFormatter

    if is_share:
        return PercentFormatter(1.0, symbol=" %")
    return EngFormatter(sep="") if high >= 1e4 else StrMethodFormatter("{x:.6g}")


def _line(axes: "Axes", curve: Curve, color: str, name: str, smooth: bool) -> None:
    """A curve; a long one that is to be smoothed as its mean before what was measured; where it broke, a cross."""
    if not curve.finite:
        return
    label = name or None
    if smooth and len(curve) >= SMOOTH_FROM:
        mean = smoothed(curve, max(2, round(_REACH * len(curve))))
        axes.plot(curve.steps, curve.values, color=color, linewidth=0.8, alpha=0.35)
        axes.plot(mean.steps, mean.values, color=color, linewidth=1.6, label=label)
    else:
        marker = "o" if len(curve) <= _MARKED_UP_TO else ""
        axes.plot(curve.steps, curve.values, color=color, linewidth=1.6, marker=marker, markersize=3.5, label=label)
    broken = [step for step, value in zip(curve.steps, curve.values, strict=True) if not math.isfinite(value)]
    if broken:
        axes.plot(broken[:1], [0.03], "x", color=BAD, transform=axes.get_xaxis_transform(), clip_on=False)
