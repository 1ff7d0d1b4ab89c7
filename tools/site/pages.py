"""Which pages the site has, in which order, and where they come from.

    python -m tools.site.pages docs/kernels/ahead_of_time.md    prints a page as the site shows it, with its tables

Pages lie in build/site_sources as they do in the repository, so that links keep their targets. A mark in a page,
`<!-- built: NAME -->`, is replaced by a table that is made from a stored record. Each public module gets a page of
reference besides. All of this needs the standard library only.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools import kernel_record
from tools.site.public_names import PARTS, ROOT, public_names

STAGED = ROOT / "build" / "site_sources"
STYLE = ROOT / "tools" / "site" / "site.css"
PROJECT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_BUILT = re.compile(r"<!-- built: (\w+) -->")
TABLES: dict[str, Callable[[], str]] = {
    "compiled": kernel_record.compiled_table,
    "rehearsed": kernel_record.rehearsed_table,
    "witnessed": kernel_record.witnessed_table,
}

GUIDES = {
    "Accelerate what you have": ["docs/fuse.md", "docs/migration.md", "docs/families.md"],
    "Train": [
        "docs/training.md", "docs/finetuning.md", "docs/pretraining.md", "docs/pretraining_data.md", "docs/recipes.md",
        "docs/scaling.md",
    ],
    "Embed and rerank": ["docs/embeddings.md"],
    "Serve": ["docs/serving.md"],
    "Tokenize": ["docs/tokenizer.md", "docs/unigram.md", "docs/token_store.md"],
    "From C++": ["docs/cpp_api.md"],
    "Examples": ["examples/README.md"],
}  # fmt: skip
RESULTS = [
    "docs/results.md", "docs/tokenizer_speed.md", "docs/saved_bytes.md", "docs/host_cost.md", "docs/outer_tests.md",
    "docs/others.md", "docs/benchmarks.md",
]  # fmt: skip
ABOUT = [
    "docs/architecture.md", "docs/programs.md", "docs/environment.md",
    "docs/dependencies.md", "docs/data.md", "docs/null_driver.md", "docs/witness.md",
    "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md",
]  # fmt: skip


def navigation() -> list[Any]:
    """As MkDocs wants it: titles are those of the pages."""
    return [
        {"Start": ["README.md", "docs/start.md", "docs/glossary.md"]},
        {"Guides": [{title: pages} for title, pages in GUIDES.items()]},
        {"Reference": ["docs/api.md", *(_reference(part.module) for part in PARTS), *_folder("docs/kernels")]},
        {"Results": RESULTS},
        {"Decisions": list(_folder("docs/decisions"))},
        {"Project": ABOUT},
    ]


def _folder(name: str) -> Iterator[str]:
    """The pages of a folder, its README first."""
    found = sorted((ROOT / name).glob("*.md"), key=lambda path: (path.name != "README.md", path.name))
    return (path.relative_to(ROOT).as_posix() for path in found)


def _reference(module: str) -> str:
    return f"reference/{module}.md"


def stage() -> int:
    """Puts all pages into build/site_sources; returns how many there are."""
    shutil.rmtree(STAGED, ignore_errors=True)
    sources = [ROOT / name for name in PROJECT]
    sources += [path for path in (ROOT / "docs").rglob("*") if path.suffix in {".md", ".svg", ".png"}]
    for path in sources:
        target = STAGED / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(with_tables(without_links_out(path, set(sources))), encoding="utf-8")
        else:
            shutil.copyfile(path, target)
    shutil.copyfile(STYLE, STAGED / STYLE.name)
    (STAGED / "reference").mkdir()
    for part in PARTS:
        (STAGED / _reference(part.module)).write_text(reference_of(part.module), encoding="utf-8")
    return sum(1 for _ in STAGED.rglob("*.md"))


def with_tables(text: str) -> str:
    """The text of a page, in which each mark is the table that it names. KeyError where there is no such table."""
    return _BUILT.sub(lambda mark: TABLES[mark[1]](), text)


def without_links_out(page: Path, sources: set[Path]) -> str:
    """The page, in which links to files of the repository that the site has not are their text alone."""

    def replaced(link: re.Match[str]) -> str:
        text, target, _ = link.groups()
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            return link[0]
        return link[0] if (page.parent / target).resolve() in sources else text

    return _LINK.sub(replaced, page.read_text(encoding="utf-8"))


def reference_of(module: str) -> str:
    """A page of Markdown that asks for the docstrings of every public name of a module."""
    part = next(part for part in PARTS if part.module == module)
    lines = [f"# {module}", "", f"{part.title}. [How stable each name is](../docs/api.md)."]
    modules = {part.module for part in PARTS}
    for name in public_names(part):
        if name.defined in modules:
            lines += ["", f"[`{name.name}`]({name.defined}.md): {name.says}."]
        else:
            lines += ["", f"::: {name.defined}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(with_tables((ROOT / name).read_text(encoding="utf-8")), end="")
