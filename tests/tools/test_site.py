"""The site, as far as that needs nothing of its environment: what it fetches, names, pages, anchors."""

from pathlib import Path

import pytest

from tools.site import checks, hooks, pages, public_names


def test_what_a_page_would_fetch_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="stylesheet" href="https://fonts.example/x.css"><link rel="canonical" href="https://here.example/">'
        '<script src="//cdn.example/x.js"></script><img src="local.png"><a href="https://elsewhere.example">a link</a>'
        '<div style="background: url(https://img.example/y.png)"></div><style>@import "https://z.example/z.css";</style>'
    )
    (tmp_path / "b.css").write_text("@font-face { src: url('https://fonts.example/f.woff2') } p { color: red }")
    found = [line.split(": ")[1] for line in checks.fetched_from_elsewhere(tmp_path)]
    assert sorted(found) == [
        "//cdn.example/x.js", "https://fonts.example/f.woff2", "https://fonts.example/x.css",
        "https://img.example/y.png", "https://z.example/z.css",
    ]  # fmt: skip


def test_names_without_an_anchor_are_found(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "a.html").write_text('<h2 id="bert_fast.fuse">fuse</h2>')
    assert checks.missing_names(tmp_path, ["bert_fast.fuse", "bert_fast.gone"]) == ["bert_fast.gone"]


def test_every_page_is_in_the_navigation() -> None:
    def names(part: object) -> list[str]:
        if isinstance(part, str):
            return [part]
        return [name for one in (part.values() if isinstance(part, dict) else part) for name in names(one)]

    listed = names(pages.navigation())
    sources = [*pages.PROJECT, *(p.relative_to(pages.ROOT).as_posix() for p in (pages.ROOT / "docs").rglob("*.md"))]
    assert len(listed) == len(set(listed))
    assert set(sources) | {f"reference/{part.module}.md" for part in public_names.PARTS} == set(listed)


def test_links_out_of_the_site_become_text(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    page.write_text("[in](other.md#x), [out](../setup.py), [web](https://a.example), ![picture](p.svg)")
    expected = "[in](other.md#x), out, [web](https://a.example), ![picture](p.svg)"
    assert pages.without_links_out(page, {page, other}) == expected


def test_every_public_name_says_what_it_is() -> None:
    names = [name for part in public_names.PARTS for name in public_names.public_names(part)]
    assert not [name.path for name in names if not name.says]
    assert {name.stability for name in names} == {public_names.STABLE, public_names.NEW}


def test_a_stability_of_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="no nothing"):
        public_names.public_names(public_names.Part("bert_fast.optim", "", but=("nothing",)))


def test_anchors_are_those_of_forges() -> None:
    assert hooks.slug("4. Change the import", "-") == "4-change-the-import"
