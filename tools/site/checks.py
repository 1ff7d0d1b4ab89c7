"""What must hold of the built site beyond what MkDocs checks: nothing is fetched from elsewhere, no name is missing."""

import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

# Elements that make a browser fetch something by themselves; links that a reader follows are none.
FETCHED = {"audio": "src", "embed": "src", "iframe": "src", "img": "src", "object": "data", "script": "src",
    "source": "src", "track": "src", "video": "src"}  # fmt: skip
STYLES = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)")


class _Fetches(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag in FETCHED and FETCHED[tag] in given:
            self.urls.append(given[FETCHED[tag]])
        if tag == "link" and not {"canonical", "next", "prev"} & set(given.get("rel", "").split()):
            self.urls.append(given.get("href", ""))
        self.urls += STYLES.findall(given.get("style", ""))


def fetched_from_elsewhere(site: Path) -> Iterator[str]:
    """`page: URL` for all that a browser would fetch from another place than the site."""
    for path in sorted(site.rglob("*")):
        if path.suffix == ".html":
            text = path.read_text(encoding="utf-8")
            found = [url for url in _read(text).urls if re.match(r"(https?:)?//", url)] + STYLES.findall(text)
        elif path.suffix == ".css":
            found = STYLES.findall(path.read_text(encoding="utf-8"))
        else:
            continue
        yield from (f"{path.relative_to(site)}: {url}" for url in dict.fromkeys(found))


def missing_names(site: Path, names: Iterable[str]) -> list[str]:
    """Those of the dotted names that no page of the site has an anchor for."""
    ids: set[str] = set()
    for path in (site / "reference").glob("*.html"):
        ids |= _read(path.read_text(encoding="utf-8")).ids
    return [name for name in names if name not in ids]


def _read(text: str) -> _Fetches:
    parser = _Fetches()
    parser.feed(text)
    return parser
