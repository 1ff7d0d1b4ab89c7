"""Checks the links of every Markdown file: a relative one leads to a file, and its #fragment to a heading of that file.

    .venv/bin/python tools/check_links.py

Links to the web are not followed. `make site` builds the pages.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent


def sources() -> list[Path]:
    return [path for pattern in ("*.md", "docs/**/*.md", "examples/*.md") for path in sorted(ROOT.glob(pattern))]


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


def main() -> int:
    broken = [problem for path in sources() for problem in broken_links(path)]
    for problem in broken:
        print(problem, file=sys.stderr)
    print(f"{len(sources())} pages, {len(broken)} broken links")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
