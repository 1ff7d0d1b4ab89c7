"""How drawings of benchmarks look, on their pages and in docs/: matplotlib draws them."""

import io
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAIN, SECOND, INK, SOFT, BAD = "#0f6b8f", "#e08a3c", "#26323b", "#5d6b76", "#b3402a"
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, sharp, searchable
    "svg.hashsalt": "bert_fast",  # the same numbers give the same bytes
    "path.simplify_threshold": 1.0,  # of a pixel: what nobody can see of a long curve is left out
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
    """While it is entered, figures and axes are made in this style."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def svg(draw: "Callable[[Figure], None]", width: float, height: float) -> str:
    """What `draw(figure)` draws, `width` times `height` inches, without an XML header."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Names that nothing points to would be the same in every drawing of a page.
    wanted = set(re.findall(r"#([\w.-]+)", text))
    return re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in wanted else "", text)


def bars(axes: "Axes", names: Sequence[str], values: Sequence[float], labels: Sequence[str], colors: Any) -> None:
    """A horizontal bar for each name, from the top down, with a label behind it.

    colors: one for all, or one for each.
    """
    axes.bar_label(axes.barh(range(len(names)), values, 0.72, color=colors), labels, padding=4)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)
