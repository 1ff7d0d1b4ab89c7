"""Drawings by matplotlib as SVG text, to be put into a page."""

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BAD", "INK", "MAIN", "SECOND", "SOFT", "svg"]

MAIN, SECOND, INK, SOFT, BAD = "#0f6b8f", "#e08a3c", "#26323b", "#5d6b76", "#b3402a"
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, sharp, searchable
    "svg.hashsalt": "bert_fast",  # the same numbers give the same bytes
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


def svg(draw: "Callable[[Figure], None]", width: float, height: float) -> str:
    """What `draw(figure)` draws, `width` times `height` inches, without an XML header."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Names that nothing points to would be the same in every drawing of a page.
    wanted = set(re.findall(r"#([\w.-]+)", text))
    return re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in wanted else "", text)
