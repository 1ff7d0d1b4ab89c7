"""Prints the release notes: the section of the changelog for the version in `bert_fast/_version.py`.

    python -m tools.release_notes [--tag v0.1.0] [--links https://forge.example/owner/name/blob/v0.1.0]

`--links` is put before relative links, which lead nowhere outside the repository. With `--tag` the section must be that
of the tag and have the day in its heading; before a release it may say that there is no tag yet.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<when>.+))?$", re.MULTILINE)
RELATIVE_LINK = re.compile(r"(?<=\]\()(?![a-z][a-z0-9+.-]*:|#)(?=[^)\s]+\))")


def version() -> str:
    text = (ROOT / "bert_fast" / "_version.py").read_text(encoding="utf-8")
    return re.findall(r'__version__ = "(.+)"', text)[0]


def section_of(changelog: str, name: str) -> tuple[str, str]:
    """What the heading says of the day, and the text below it; ValueError without such a section, or text in it."""
    headings = list(HEADING.finditer(changelog))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        if heading["version"] == name:
            text = changelog[heading.end() : following.start() if following else None].strip()
            if not text:
                raise ValueError(f"CHANGELOG.md: nothing stands under [{name}]")
            return heading["when"] or "", text
    raise ValueError(f"CHANGELOG.md: no section [{name}], only {', '.join(found['version'] for found in headings)}")


def notes(changelog: str, name: str, tag: str | None = None, links: str | None = None) -> str:
    """The section of version `name`; ValueError where a tag is given that it does not belong to."""
    when, text = section_of(changelog, name)
    if tag is not None and tag != f"v{name}":
        raise ValueError(f"--tag: expected v{name}, the version in bert_fast/_version.py, got {tag}")
    if tag is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", when):
        raise ValueError(f"CHANGELOG.md: the heading of [{name}] has no day, expected ' - YYYY-MM-DD', got {when!r}")
    return RELATIVE_LINK.sub(links.rstrip("/") + "/", text) if links else text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release_notes", description=__doc__.splitlines()[0])
    parser.add_argument("--tag", help="the tag that the notes are for")
    parser.add_argument("--links", metavar="ADDRESS", help="what relative links are relative to")
    options = parser.parse_args()
    try:
        print(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version(), options.tag, options.links))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
