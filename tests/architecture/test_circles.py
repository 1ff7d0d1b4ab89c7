"""No module imports, over others or at once, a module that imports it: not within a function either, nor for types."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.imports import imported_names

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bert_fast", "benchmarks", "tools")
COMPILED = {"bert_fast._native"}  # imports nothing, least of all the package whose name is part of its own

Graph = dict[str, dict[str, str]]  # module -> module that it imports -> file:line where it does


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def import_graph(root: Path, folders: tuple[str, ...]) -> Graph:
    """What modules import of one another. That a module's packages run before it is no import of theirs."""
    modules = {module_name(path, root): path for folder in folders for path in sorted((root / folder).rglob("*.py"))}
    graph: Graph = {name: {} for name in modules}
    for name, path in modules.items():
        for imported, line in imported_names(path, root):
            target = "" if imported in COMPILED else imported
            while target and target not in modules:  # a name within a module
                target = target.rpartition(".")[0]
            if target and target != name:
                graph[name].setdefault(target, f"{path.relative_to(root).as_posix()}:{line}")
    return graph


def reached(graph: Graph, start: str) -> set[str]:
    """Modules that `start` imports, over others or at once."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()].keys() - found
        found |= new
        waiting += new
    return found


def circles(graph: Graph) -> Iterator[str]:
    """Every strongly connected component of more than one module, with the imports that hold it together."""
    reach = {module: reached(graph, module) for module in graph}
    components = {frozenset(other for other in found if module in reach[other]) for module, found in reach.items()}
    for component in sorted(map(sorted, components - {frozenset()})):
        imports = [
            f"    {where} imports {target}"
            for module in component
            for target, where in graph[module].items()
            if target in component
        ]
        yield "\n".join([f"circle of {', '.join(component)}:", *imports])


def test_imports_go_in_no_circle() -> None:
    found = list(circles(import_graph(ROOT, FOLDERS)))
    assert not found, "move what both sides need into a module below them\n" + "\n".join(found)


PLANTED = {
    "at once": {"a": "import pack.b", "b": "from pack import a"},
    "within a function": {"a": "from pack.b import f", "b": "def f():\n    from pack.a import g"},
    "for types": {"a": "if TYPE_CHECKING:\n    from pack.b import F", "b": "from pack.a import g"},
    "relative": {"a": "from . import b", "b": "from .a import g"},
    "by name": {"a": "import_module('pack.b')", "b": "import pack.a"},
    "over a package": {"__init__": "from pack.a import g", "a": "from pack import g"},
    "of three": {"a": "import pack.b", "b": "import pack.c", "c": "import pack.a", "d": "import pack.a"},
}


@pytest.mark.parametrize("files", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_circle_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    plant(tmp_path, files)
    (found,) = circles(import_graph(tmp_path, ("pack",)))
    names = {"pack" if name == "__init__" else f"pack.{name}" for name in files if name != "d"}
    title, *imports = found.splitlines()
    assert title == f"circle of {', '.join(sorted(names))}:"
    assert len(imports) == len(names)
    assert all(f"pack/{name}.py:" in found for name in files if name != "d") and "pack.d" not in found


def test_what_is_no_circle_is_not_found(tmp_path: Path) -> None:
    plant(tmp_path, {"__init__": "from pack.a import g", "a": "import os\nfrom pack.b import g", "b": "import pack.b"})
    assert not list(circles(import_graph(tmp_path, ("pack",))))


def test_circles_that_do_not_touch_are_told_apart(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {"a": "import pack.b", "b": "import pack.a\nimport pack.c", "c": "import pack.d", "d": "import pack.c"},
    )
    first, second = circles(import_graph(tmp_path, ("pack",)))
    assert "pack.a, pack.b:" in first and "pack/a.py:1 imports pack.b" in first and "pack.c" not in first
    assert "pack.c, pack.d:" in second


def plant(root: Path, files: dict[str, str]) -> None:
    (root / "pack").mkdir()
    for name, text in files.items():
        (root / "pack" / f"{name}.py").write_text(text + "\n", encoding="utf-8")
