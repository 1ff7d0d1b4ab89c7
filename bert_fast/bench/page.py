"""A page of HTML that needs nothing else: no script, no font, no network.

Text is escaped here and nowhere else.
"""

from collections.abc import Iterable, Sequence
from html import escape

_CSS = """
:root { color-scheme: light; --ink: #26323b; --soft: #5d6b76; --line: #dde4e9; --bad: #b3402a; --good: #2e7d4f; }
body { margin: 0; background: #f4f6f8; color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 24px 40px; }
h1 { display: inline; font-size: 26px; margin: 0 16px 0 0; }
h2 { font-size: 17px; margin: 0 0 8px; }
header p, figcaption { margin: 6px 0 0; color: var(--soft); }
.verdict { font-size: 14px; font-weight: 600; padding: 2px 12px; border-radius: 12px; color: #fff; }
.good { background: var(--good); }
.bad { background: var(--bad); }
.open { background: var(--soft); }
section { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin-top: 16px; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
table { width: 100%; border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); border-bottom: 2px solid var(--line); }
th, td { padding: 5px 14px 5px 0; vertical-align: top; }
tr + tr td { border-top: 1px solid var(--line); }
.number { text-align: right; white-space: nowrap; }
.scroll { overflow-x: auto; }
.failed { color: var(--bad); font-weight: 700; }
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


def joined(parts: Iterable[str]) -> Html:
    """Pieces one after the other."""
    return Html("".join(map(inline, parts)))


def section(title: str, body: str) -> Html:
    """A box with a heading."""
    return tagged("section", joined((tagged("h2", title), body)))


def figure(title: str, svg: Html, caption: str) -> Html:
    """A box with a drawing and what to see in it."""
    return section(title, tagged("figure", joined((svg, tagged("figcaption", caption)))))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> Html:
    """A table; columns in `numeric` are aligned to the right. Without a head if that is empty."""

    def line(tag: str, cells: Sequence[str]) -> Html:
        marks = ("number" if place in numeric else "" for place in range(len(cells)))
        return tagged("tr", joined(tagged(tag, cell, mark) for cell, mark in zip(cells, marks, strict=True)))

    lines = [line("td", row) for row in rows]
    return tagged("div", tagged("table", joined([line("th", head), *lines] if head else lines)), "scroll")


def page(title: str, text: str, verdict: str, is_good: bool | None, sections: Iterable[Html]) -> str:
    """The whole document, around sections. is_good: of the verdict; None: neither."""
    kind = "open" if is_good is None else "good" if is_good else "bad"
    badge = tagged("span", verdict, f"verdict {kind}")
    header = tagged("header", joined((tagged("h1", title), badge, tagged("p", text))))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{tagged('title', title)}\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n{tagged('main', joined((header, *sections)))}\n</body>\n</html>\n"
    )
