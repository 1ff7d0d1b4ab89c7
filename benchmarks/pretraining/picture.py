"""All stored curves in one picture: docs/pretraining_curves.svg."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.kit.drawing import BAD, INK, MAIN, SECOND, SOFT, svg
from benchmarks.kit.record import ROOT, read_lines
from bert_fast.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PATH = ROOT / "docs" / "pretraining_curves.svg"
_WIDTH, _HEIGHT = 10.0, 9.0
_COLORS = (MAIN, SECOND, BAD, "#5b8c3e", "#7a5aa6", "#a68a2f", "#3a9a9a", "#b05a8a", SOFT, INK, "#8a5a3c")


def draw(stored: Path, output: Path) -> Path:
    """Draws the newest line of each name; returns the file.

    Raises:
        SystemExit: nothing to draw is stored.
    """
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for line in read_lines(stored) if stored.exists() else ():
        if line["kind"] in ("learned", "ablation", "beside"):
            newest[line["kind"], str(line.get("name", line.get("initializer_range")))] = line
    if not newest:
        raise SystemExit(f"{stored}: no curves; python -m benchmarks.pretraining --help says how they are made")
    of_kind = {
        kind: [line for (found, _), line in newest.items() if found == kind]
        for kind in ("learned", "beside", "ablation")
    }

    def picture(figure: "Figure") -> None:
        top, middle, bottom = figure.subplots(3, 1)
        _learned(top, of_kind["learned"])
        _beside(middle, of_kind["beside"])
        _ablations(bottom, of_kind["ablation"])
        for axes in (top, middle, bottom):
            axes.set_ylabel("loss of masked words")
            axes.set_xlabel("steps")
            axes.grid(visible=True)

    text = svg(picture, _WIDTH, _HEIGHT)
    write_atomically(output, lambda path: path.write_text(text + "\n", encoding="utf-8"))
    return output


def _learned(axes: "Axes", lines: list[dict[str, Any]]) -> None:
    axes.set_title("The run: training (pale), text that it did not see (strong), guessing without context (dashed)")
    for color, line in zip(_COLORS, lines, strict=False):
        axes.plot(*zip(*line["curve"], strict=True), color=color, alpha=0.35)
        points = [(one["step"], one["masked_lm"]) for one in line["evaluations"]]
        axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=line["name"])
        axes.axhline(line["found"]["context_free_loss"], color=color, linestyle="--", linewidth=1)
    if lines:
        axes.legend()


def _beside(axes: "Axes", lines: list[dict[str, Any]]) -> None:
    axes.set_title("The same weights, batches and masks: bert_fast (wide, pale) and transformers (thin)")
    for color, line in zip(_COLORS, lines, strict=False):
        steps, ours, theirs = zip(*line["curve"], strict=True)
        axes.plot(steps, ours, color=color, linewidth=5, alpha=0.35)
        axes.plot(steps, theirs, color=color, linewidth=1, label=f"initializer_range {line['initializer_range']:g}")
    if lines:
        axes.legend()


def _ablations(axes: "Axes", lines: list[dict[str, Any]]) -> None:
    axes.set_title("One part changed in each: training (last value of masked_lm on other text behind the name)")
    for color, line in zip(_COLORS, lines, strict=False):
        last = line["evaluations"][-1]["masked_lm"]
        axes.plot(*zip(*line["curve"], strict=True), color=color, linewidth=1.2, label=f"{line['name']} ({last:.2f})")
    if lines:
        axes.legend(fontsize=8, ncols=2)
