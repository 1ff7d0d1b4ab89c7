"""The site, as far as that needs nothing of its environment: what it fetches, names, pages, anchors."""

import re
import subprocess
import sys
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


def test_pages_are_staged_with_their_tables_by_the_standard_library_alone(tmp_path: Path) -> None:
    """The site's environment has none of the packages that the kernels need: -S takes all packages away."""
    code = (
        f"from tools.site import pages; pages.STAGED = pages.Path({str(tmp_path / 'staged')!r}); print(pages.stage())"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=pages.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    staged = {path.relative_to(tmp_path / "staged").as_posix(): path for path in (tmp_path / "staged").rglob("*.md")}
    assert int(done.stdout) == len(staged)
    texts = {name: path.read_text(encoding="utf-8") for name, path in staged.items()}
    assert not [name for name, text in texts.items() if "<!-- built:" in text]
    sources = [path.read_text(encoding="utf-8") for path in (pages.ROOT / "docs").rglob("*.md")]
    marks = [mark for text in sources for mark in re.findall("<!-- built: (.*) -->", text)]
    assert sorted(marks) == sorted(pages.TABLES)
    assert "\n| `lamb_update` | " in texts["docs/kernels/ahead_of_time.md"]
    assert "\n| `lamb_update` | " in texts["docs/witness.md"]
    assert "\n| `optimizer` | " in texts["docs/null_driver.md"]


def test_a_mark_of_no_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        pages.with_tables("<!-- built: nothing -->")


def test_every_public_name_says_what_it_is() -> None:
    names = [name for part in public_names.PARTS for name in public_names.public_names(part)]
    assert not [name.path for name in names if not name.says]
    assert {name.stability for name in names} == {public_names.STABLE, public_names.NEW}


def test_a_stability_of_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="no nothing"):
        public_names.public_names(public_names.Part("bert_fast.optim", "", but=("nothing",)))


def test_anchors_are_those_of_forges() -> None:
    assert hooks.slug("4. Change the import", "-") == "4-change-the-import"
