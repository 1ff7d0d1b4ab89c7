"""One picture of speeds, times those of transformers: as text for a terminal and as SVG for a page.

The SVG brings its own background and follows the reader's light or dark setting, so it can be shown anywhere.
"""

from dataclasses import dataclass
from html import escape

_WIDTH, _MARGIN, _FIGURES, _LETTER = 680, 20, 66, 8  # pixels: of the picture, its edge, the figures, a letter
_ROW, _BAR = 30, 18  # pixels: from bar to bar, and of a bar
_STYLE = """
.card { fill: #ffffff; stroke: #d5dce1 } .ink { fill: #1f2a33 } .soft { fill: #5a6773 }
.ours { fill: #0f6b8f } .theirs { fill: #a9b4bd } .one { stroke: #5a6773 }
@media (prefers-color-scheme: dark) {
  .card { fill: #12181d; stroke: #323c45 } .ink { fill: #e8eef2 } .soft { fill: #9fadb8 }
  .ours { fill: #3fa7cf } .theirs { fill: #56626c } .one { stroke: #9fadb8 }
}
text { font-family: system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; font-size: 15px }
.title { font-size: 18px; font-weight: 600 } .figure { font-weight: 600 } .note { font-size: 13px }
"""


@dataclass(frozen=True)
class Bar:
    """How many times as fast as transformers (ratio) something is (label)."""

    label: str
    ratio: float


@dataclass(frozen=True)
class Group:
    """Bars of one model."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Picture:
    """Groups of bars below a title. notes: what a reader must know beside them, a line each."""

    title: str
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()

    @property
    def longest(self) -> float:
        """The largest ratio, at least 1."""
        return max((1.0, *(bar.ratio for group in self.groups for bar in group.bars)))

    def described(self) -> str:
        """All of it in words, for who cannot see it."""
        groups = (f"{g.title}: {', '.join(f'{b.label} {b.ratio:.1f}x' for b in g.bars)}" for g in self.groups)
        return f"{self.title}. {'. '.join(groups)}."


def as_text(picture: Picture, width: int = 78, is_ascii: bool = False) -> str:
    """The picture in at most `width` columns; a bar's first part, as long as transformers', has a lighter shade."""
    theirs, ours = ("-", "#") if is_ascii else ("\u2592", "\u2588")
    labels = max((len(bar.label) for group in picture.groups for bar in group.bars), default=0)
    unit = max(1, width - labels - 11) / picture.longest  # columns of 1x
    lines = [picture.title]
    for group in picture.groups:
        lines += ["", group.title]
        for bar in group.bars:
            first = round(min(1.0, bar.ratio) * unit)
            rest = max(0, round(bar.ratio * unit) - first)
            lines.append(f"  {bar.label:<{labels}}  {theirs * first}{ours * rest} {bar.ratio:.1f}x")
    return "\n".join([*lines, "", *picture.notes]) + "\n"


def as_svg(picture: Picture) -> str:
    """The picture as an SVG document: a bar for each ratio, and below it transformers' own, which is 1."""
    start = _MARGIN + 10 + _LETTER * max((len(bar.label) for group in picture.groups for bar in group.bars), default=0)
    unit = (_WIDTH - _MARGIN - start - _FIGURES) / picture.longest  # pixels of 1x
    y, parts = 42, []
    parts.append(f'<text class="title ink" x="{_MARGIN}" y="{y}">{escape(picture.title)}</text>')
    for group in picture.groups:
        y += 34
        parts.append(f'<text class="soft" x="{_MARGIN}" y="{y}">{escape(group.title)}</text>')
        top = y + 10
        for bar in group.bars:
            y += _ROW
            middle, ours = y - _BAR / 2 + 4, bar.ratio * unit
            parts.append(f'<text class="ink" x="{start - 10}" y="{y}" text-anchor="end">{escape(bar.label)}</text>')
            parts.append(_box("ours", start, middle - _BAR / 2 - 1, ours, _BAR - 6))
            parts.append(_box("theirs", start, middle + _BAR / 2 - 7, unit, 6))
            figure = f'<text class="figure ink" x="{start + max(ours, unit) + 8:.1f}" y="{y}">{bar.ratio:.1f}x</text>'
            parts.append(figure)
        parts.append(f'<line class="one" x1="{start}" x2="{start}" y1="{top}" y2="{y + 8}"/>')
    y += 12
    for note in picture.notes:
        y += 22
        parts.append(f'<text class="note soft" x="{_MARGIN}" y="{y}">{escape(note)}</text>')
    height = y + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">\n'
        f"<title>{escape(picture.described())}</title>\n<style>{_STYLE}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="10"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="2"/>'
