"""Release notes are the changelog's section of the version, and a tag gets none that are not its own."""

import re

import pytest

from bert_fast import __version__
from tools.release_notes import ROOT, notes, section_of, version

CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2027-01-31

Second, [see](docs/a.md#b), [there](https://c.example/d) and [below](#e).

### Added
- `f(x)`, ![drawn](g.svg)

## [0.1.0] - not tagged yet
First.
"""


def test_a_section_ends_where_the_next_begins() -> None:
    when, text = section_of(CHANGELOG, "0.2.0")
    assert when == "2027-01-31"
    assert text.startswith("Second,")
    assert text.endswith("![drawn](g.svg)")
    assert section_of(CHANGELOG, "0.1.0") == ("not tagged yet", "First.")


def test_relative_links_alone_get_an_address() -> None:
    text = notes(CHANGELOG, "0.2.0", "v0.2.0", "https://forge.example/blob/v0.2.0/")
    links = re.findall(r"\]\(([^)]+)\)", text)
    base = "https://forge.example/blob/v0.2.0"
    assert links == [f"{base}/docs/a.md#b", "https://c.example/d", "#e", f"{base}/g.svg"]
    assert "`f(x)`" in text


@pytest.mark.parametrize(
    ("name", "tag", "message"),
    [
        ("0.3.0", None, r"no section \[0.3.0\], only Unreleased, 0.2.0, 0.1.0"),
        ("Unreleased", None, r"nothing stands under \[Unreleased\]"),
        ("0.2.0", "v0.1.0", "expected v0.2.0.*got v0.1.0"),
        ("0.1.0", "v0.1.0", "no day.*got 'not tagged yet'"),
    ],
)
def test_what_does_not_belong_to_a_tag_is_refused(name: str, tag: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        notes(CHANGELOG, name, tag)


def test_the_present_version_has_notes() -> None:
    assert version() == __version__
    text = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version())
    assert len(text.splitlines()) > 20
    assert "\n## " not in text
