"""A page of HTML that needs nothing else: no script, no font, no network.

Text is escaped here and nowhere else.
"""

from collections.abc import Iterable, Sequence
from html import escape

__all__ = [
    "Html", "cards", "columns", "figure", "inline", "joined", "notes", "page", "section", "table", "tagged",
]  # fmt: skip

_CSS = """
:root {
  color-scheme: light;
  --ink: #26323b; --soft: #5d6b76; --line: #dde4e9; --accent: #0f6b8f; --bad: #b3402a; --good: #2e7d4f;
}
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6f8; color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 24px 40px; }
header { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 16px; }
header p { flex-basis: 100%; margin: 0 0 10px; color: var(--soft); }
h1 { font-size: 26px; margin: 0; }
h2 { font-size: 17px; margin: 0 0 8px; }
.verdict { font-size: 14px; font-weight: 600; padding: 2px 12px; border-radius: 12px; color: #fff; }
.good { background: var(--good); }
.bad { background: var(--bad); }
.open { background: var(--soft); }
section { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin-top: 16px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(185px, 1fr)); gap: 14px; margin-top: 12px; }
.cards section { margin: 0; }
.cards b { display: block; font-size: 23px; line-height: 1.25; color: var(--accent); }
.cards span { display: block; font-size: 13.5px; line-height: 1.4; color: var(--soft); }
.columns { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(430px, 100%), 1fr)); gap: 0 16px; }
figure { margin: 0; }
figcaption { margin-top: 6px; font-size: 13.5px; color: var(--soft); }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit !important; }
table { width: 100%; border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); border-bottom: 2px solid var(--line); }
th, td { padding: 5px 14px 5px 0; vertical-align: top; }
td + td, .verdict { overflow-wrap: anywhere; }
tr + tr td { border-top: 1px solid var(--line); }
td.number { white-space: nowrap; }
.number { text-align: right; }
.scroll { overflow-x: auto; }
.scroll td { overflow-wrap: normal; }
.passed { color: var(--good); font-weight: 600; }
.failed { color: var(--bad); font-weight: 700; }
section > .columns { gap: 14px 32px; }
.question { font-weight: 600; margin: 0 0 4px; }
ol, ul { margin: 0; padding-left: 20px; font-size: 14px; }
li { margin-bottom: 6px; }
.score { color: var(--soft); }
.passage {
  margin: 0; font-size: 13px; overflow: hidden;
  display: -webkit-box; -webkit-line-clamp: 3; -webkit-box-orient: vertical;
}
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""


class Html(str):
    """Text that is HTML already. Everything else is escaped on its way into the page."""

    __slots__ = ()


def inline(content: str) -> Html:
    """Escapes what is not HTML yet."""
    return content if isinstance(content, Html) else Html(escape(content))


def tagged(tag: str, content: str, css_class: str = "") -> Html:
    """An element around content."""
    attributes = f' class="{escape(css_class)}"' if css_class else ""
    return Html(f"<{tag}{attributes}>{inline(content)}</{tag}>")


def joined(parts: Iterable[str], between: str = "") -> Html:
    """Pieces one after the other."""
    return Html(between.join(map(inline, parts)))


def section(title: str, body: str) -> Html:
    """A box with a heading."""
    return tagged("section", joined((tagged("h2", title), body)))


def figure(title: str, svg: Html, caption: str) -> Html:
    """A box with a drawing and what to see in it."""
    named = Html(svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1))
    return section(title, tagged("figure", joined((named, tagged("figcaption", caption)))))


def columns(parts: Iterable[str]) -> Html:
    """Parts two by two, where there is room."""
    return tagged("div", joined(parts), "columns")


def cards(items: Iterable[tuple[str, str]]) -> Html:
    """Boxes with a large value and a few words each."""
    boxes = (tagged("section", joined((tagged("b", value), tagged("span", text)))) for value, text in items)
    return tagged("div", joined(boxes), "cards")


def notes(items: Iterable[str]) -> Html:
    """A list."""
    return tagged("ul", joined(tagged("li", item) for item in items))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> Html:
    """A table; columns in `numeric` are aligned to the right. Without a head if that is empty."""

    def line(tag: str, cells: Sequence[str]) -> Html:
        marks = ("number" if place in numeric else "" for place in range(len(cells)))
        return tagged("tr", joined(tagged(tag, cell, mark) for cell, mark in zip(cells, marks, strict=True)))

    lines = [line("td", row) for row in rows]
    return tagged("table", joined([line("th", head), *lines] if head else lines))


def page(title: str, text: str, verdict: str, is_good: bool | None, sections: Iterable[Html]) -> str:
    """The whole document, around sections. is_good: of the verdict; None: neither."""
    kind = "open" if is_good is None else "good" if is_good else "bad"
    badge = tagged("span", verdict, f"verdict {kind}")
    header = tagged("header", joined((tagged("h1", title), badge, tagged("p", text))))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{tagged('title', title)}\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n{tagged('main', joined((header, *sections), between=chr(10)))}\n</body>\n</html>\n"
    )
