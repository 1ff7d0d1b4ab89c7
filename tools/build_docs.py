"""Checks the links of every Markdown file and renders them to build/docs.

    .venv/bin/python tools/build_docs.py [--check]      (--check: links only)

A relative link must lead to a file, and its #fragment to a heading of that file. Links to the web are not followed.
"""

import argparse
import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "build" / "docs"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ max-width: 55rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 sans-serif }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #bbb; padding: .2rem .5rem }}
pre, code {{ background: #f4f4f4 }} pre {{ padding: .6rem; overflow-x: auto }}</style></head>
<body>{body}</body></html>
"""


def sources() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def tokens_of(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))


def flatten(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from flatten(token.children or [])


def anchors(path: Path) -> set[str]:
    """What a #fragment may name: headings in lower case, punctuation dropped, spaces as hyphens."""
    tokens = tokens_of(path)
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> Iterator[str]:
    for token in flatten(tokens_of(path)):
        link = token.attrs.get("href") or token.attrs.get("src")
        if not link or re.match(r"[a-z][a-z0-9+.-]*:", str(link)):
            continue
        name, _, fragment = unquote(str(link)).partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            yield f"{path.relative_to(ROOT)}: {link}: no such file"
        elif fragment and target.suffix == ".md" and fragment not in anchors(target):
            yield f"{path.relative_to(ROOT)}: {link}: no such heading"


def render(path: Path) -> None:
    body = MarkdownIt("commonmark").enable("table").render(path.read_text(encoding="utf-8"))
    body = re.sub(r'(href="(?![a-z][a-z0-9+.-]*:)[^"#]+)\.md(["#])', r"\1.html\2", body)
    target = OUTPUT / path.relative_to(ROOT).with_suffix(".html")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(PAGE.format(title=html.escape(path.stem), body=body), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="check the links, write nothing")
    arguments = parser.parse_args()
    broken = [problem for path in sources() for problem in broken_links(path)]
    for problem in broken:
        print(problem, file=sys.stderr)
    if not arguments.check:
        for path in sources():
            render(path)
    print(f"{len(sources())} pages, {len(broken)} broken links" + ("" if arguments.check else f"; see {OUTPUT}"))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
