"""Pictures of stored results, which matplotlib draws while `styled` is entered."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from benchmarks.plot.stored import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAIN, INK, SOFT = "#0f6b8f", "#26323b", "#5d6b76"
GOAL = INK
TITLE: dict[str, Any] = {"fontsize": 9, "fontweight": "normal"}  # long ones
# One colour for a contestant wherever it appears; peers that are not listed share the last.
COLOURS = {"eager": "#9aa5b1", "compiled": "#e08e2b", "liger": "#3f9b5b", "apex": "#8e5bb5", "flash_attn": "#c2506b"}
MODE_COLOURS = {"fwd": MAIN, "bwd": "#7fb8d0", "fwd_bwd": MAIN, "step": MAIN}
GOAL_SHARES = (0.8, 0.9)  # at 4,096 tokens; from 16,384 on
GOAL_RATE = 0.85  # of the library's, of a matrix product alone
_STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#b9c3cb",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": "#e4e9ed",
    "axes.axisbelow": True,
}


def styled() -> AbstractContextManager[Any]:
    """While it is entered, figures and axes are made in the style of these pictures."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def _figure(labels: Sequence[str], per_row: float = 1.0, columns: int = 1, width: float = 9.0) -> tuple["Figure", Any]:
    """A figure with a place for each label, downwards from 0; its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, max(2.2, 1.1 + 0.27 * per_row * len(labels))), layout="constrained")
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.grid(axis="x")
        axis.tick_params(labelsize=8, labelfontfamily="monospace")
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].set_ylim(len(labels) - 0.4, -0.6)
    return figure, axes


def _bars(axis: Any, values: Sequence[float], labels: Sequence[str]) -> None:
    """A horizontal bar for each place of `_figure`, with a label behind it."""
    axis.bar_label(axis.barh(range(len(values)), values, 0.72, color=MAIN), labels, padding=4)
    axis.tick_params(axis="y", length=0)


def family_figure(title: str, rows: Sequence[Row]) -> "Figure":
    """Left: share of the ceiling, a bar for each case and mode. Right: how many times as fast as the others."""
    others = [name for name in COLOURS if any(name in row.speedups for row in rows)]
    others += sorted({name for row in rows for name in row.speedups} - set(others))
    per_row = max(1.0, 0.55 * len(others))
    has_share = any(row.share is not None for row in rows)
    labels = [f"{row.label}  {row.mode}" for row in rows]
    figure, axes = _figure(labels, per_row, 2 if has_share else 1, 11.0 if has_share else 8.0)
    if has_share:
        _shares(axes[0], rows)
    _speedups(axes[-1], rows, others)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def _shares(axis: Any, rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows):
        share = row.share or 0.0
        axis.barh(number, share, 0.72, color=MODE_COLOURS[row.mode])
        # At the foot of the bar, where the lines of the goals do not run through it.
        inside = share > 0.1
        colour = "white" if inside and row.mode != "bwd" else "black"
        axis.text(0.015 if inside else share + 0.01, number, f"{share:.0%}", va="center", fontsize=9, color=colour)
    for goal in GOAL_SHARES:
        axis.axvline(goal, color=GOAL, linewidth=0.9, linestyle="--")
    axis.set_xlim(0, max(1.12, *((row.share or 0.0) + 0.1 for row in rows)))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    by_matmul = any("share_of_matmul_ceiling" in row.result for row in rows)
    ceiling = "ceiling that binds (copy or bf16 matrix product)" if by_matmul else "copy bandwidth"
    axis.set_title(f"share of the {ceiling} measured in the same run", **TITLE)


def _speedups(axis: Any, rows: Sequence[Row], others: Sequence[str]) -> None:
    height = 0.8 / max(1, len(others))
    for index, name in enumerate(others):
        places = [i + height * (index + 0.5) - 0.4 for i, row in enumerate(rows) if name in row.speedups]
        speedups = [row.speedups[name] for row in rows if name in row.speedups]
        colour = COLOURS.get(name, "#7f7f7f")
        found = axis.barh(places, speedups, height * 0.92, color=colour, label=name)
        axis.bar_label(found, fmt=" {:.2g}x", fontsize=7)
    axis.axvline(1.0, color=GOAL, linewidth=0.9)
    largest = max((s for row in rows for s in row.speedups.values()), default=1.0)
    axis.set_xlim(0, max(1.2, largest * 1.15))
    axis.set_title("bert_fast is ... times as fast as", **TITLE)
    if others:
        axis.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, borderpad=0)


def products_figure(products: dict[str, list[dict[str, Any]]]) -> "Figure":
    """Matrix products: our fastest tile's rate over the library with separate kernels."""
    figure, (axis,) = _figure(list(products), width=11.0)
    best = [
        max((line["speedup_over_library"] for line in lines if line["tile"] is not None), default=0.0)
        for lines in products.values()
    ]
    _bars(axis, best, [f"{value:.2f}x" if value else "library alone" for value in best])
    axis.set_xlim(0, 1.12 * max(1.0, *best))
    axis.axvline(1.0, color=GOAL, linewidth=0.9)
    axis.axvline(GOAL_RATE, color=GOAL, linewidth=0.9, linestyle="--")
    axis.set_title("our kernel is ... times as fast as the library with separate kernels", **TITLE)
    return figure


def models_figure(results: dict[str, dict[str, Any]]) -> "Figure":
    """Whole models: real tokens per second over transformers', and the ratio aimed at where there is one."""
    found = {case: line for case, line in results.items() if "transformers_tokens_per_s" in line}
    figure, (axis,) = _figure(list(found))
    ratios = [line["ratio"] for line in found.values()]
    labels = [f"{line['ratio']:.1f}x, {line['fill']:.0%} filled" for line in found.values()]
    _bars(axis, ratios, labels)
    for number, line in enumerate(found.values()):
        if "goal" in line:
            axis.vlines(line["goal"], number - 0.36, number + 0.36, color=GOAL, linewidth=1.6)
    axis.set_xlim(0, 1.25 * max(ratios))
    axis.set_title("real tokens per second, times transformers'; a stroke marks the goal", **TITLE)
    return figure


def pieces_figure(results: dict[str, dict[str, Any]]) -> "Figure":
    """Single pieces on the CPU: how many times as fast as PyTorch or Hugging Face tokenizers; logarithmic."""
    found = {c: line for c, line in results.items() if "torch_ms" in line or "tokenizers_mb_per_s" in line}
    figure, (axis,) = _figure(list(found))
    ratios = [line["ratio"] for line in found.values()]
    others = ["PyTorch" if "torch_ms" in line else "tokenizers" for line in found.values()]
    labels = [f"{ratio:.2g}x {other}" for ratio, other in zip(ratios, others, strict=True)]
    _bars(axis, ratios, labels)
    axis.set_xscale("log")
    axis.set_xlim(min(0.5, *ratios), 3 * max(ratios))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.axvline(1.0, color=GOAL, linewidth=0.9)
    axis.set_title("times as fast (logarithmic)", **TITLE)
    return figure
