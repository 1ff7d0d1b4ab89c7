"""What each Triton kernel is made of, as a digest that comments, names of variables and launchers leave alone.

A kernel is its function and all that this reaches of bert_fast/triton by name: functions it calls, constants,
structures. Their syntax counts, without comments, docstrings and layout, and with variables named by their order; the
names of arguments stay, since launchers say which of them are specialised. Needs neither torch nor triton.
"""

import ast
import functools
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.families import family_names
from benchmarks.kit.results import ROOT

KERNELS = ROOT / "bert_fast" / "triton"
PACKAGE = "bert_fast.triton"


@dataclass(frozen=True)
class _Source:
    """A file: what it defines by name; what it imports of the package, by the name that it has here.

    imported: (file, name there); the name is "" where it is the file itself.
    """

    defined: dict[str, ast.stmt]
    imported: dict[str, tuple[str, str]]


def files() -> list[str]:
    """Names of the files that hold kernels: families, and helpers that launch kernels of their own."""
    return sorted(path.stem for path in KERNELS.glob("*.py") if kernel_names(path.stem))


def kernel_names(file: str) -> list[str]:
    """Functions of a file that are decorated with `triton.jit` and launched (named `_..._kernel`)."""
    return [
        name
        for name, node in _read(file).defined.items()
        if name.endswith("_kernel") and isinstance(node, ast.FunctionDef)
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def digest(file: str, kernel: str) -> str:
    """Digest of all that a kernel is made of."""
    # By name and text alone: a helper may move to another file.
    texts = sorted({(name, _text(_read(where).defined[name])) for where, name in made_of(file, kernel)})
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def program_of(path: Path) -> str:
    """Digest of a file's program: docstrings, comments and names of variables left out."""
    return _program_of(path.read_text(encoding="utf-8"))


@functools.cache  # of the text: many families need the same helpers
def _program_of(text: str) -> str:
    body = [node for node in ast.parse(text).body if not _is_text(node)]
    return hashlib.sha256("\n".join(map(_text, body)).encode()).hexdigest()[:16]


def made_of(file: str, kernel: str) -> set[tuple[str, str]]:
    """(file, name) of a kernel and of all that it reaches by name, directly or not."""
    waiting, reached = [(file, kernel)], set()
    while waiting:
        symbol = waiting.pop()
        if symbol not in reached:
            reached.add(symbol)
            waiting += _named_in(*symbol)
    return reached


def imports(file: str) -> set[str]:
    """Files of bert_fast/triton that a file imports, directly or not."""
    waiting, found = [file], set()
    while waiting:
        for other, _ in _read(waiting.pop()).imported.values():
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def short(kernel: str) -> str:
    """A kernel as records and reports name it."""
    return kernel.removeprefix("_").removesuffix("_kernel")


def families_of(kernels: Collection[str]) -> list[str]:
    """Families of ops that launch one of these kernels, which are named as `short` does."""
    changed = {file for file in files() if any(short(name) in kernels for name in kernel_names(file))}
    return [family for family in family_names() if changed & ({family} | imports(family))]


def kernel_digests() -> dict[str, str]:
    """Kernel -> digest of what it is made of now."""
    return dict(_digests(tuple((path.name, path.read_text(encoding="utf-8")) for path in sorted(KERNELS.glob("*.py")))))


@functools.cache  # of all texts: digests are asked for before every case that runs
def _digests(_texts: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {kernel: digest(file, kernel) for file in files() for kernel in kernel_names(file)}


def _named_in(file: str, name: str) -> Iterator[tuple[str, str]]:
    """(file, name) of what a definition names itself."""
    source = _read(file)
    variables = _variables(source.defined[name])
    for node in ast.walk(source.defined[name]):
        if isinstance(node, ast.Name) and node.id not in variables:
            if node.id in source.defined:
                yield file, node.id
            elif node.id in source.imported and source.imported[node.id][1]:
                yield _origin(*source.imported[node.id])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            other, whole = source.imported.get(node.value.id, ("", "x"))
            if not whole:
                yield _origin(other, node.attr)


def _origin(file: str, name: str) -> tuple[str, str]:
    """Where a name is defined that a file may have imported itself."""
    source = _read(file)
    return (file, name) if name in source.defined else _origin(*source.imported[name])


@functools.cache  # of the node, which `_parsed` keeps
def _text(node: ast.stmt) -> str:
    """A definition without docstrings and comments, its variables named by their order."""
    node = ast.parse(ast.unparse(node)).body[0]  # a copy
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if isinstance(body, list):
            body[:] = [one for one in body if not _is_text(one)] or [ast.Pass()]
    numbers = {name: f"v{number}" for number, name in enumerate(_variables(node))}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            inner.id = numbers.get(inner.id, inner.id)
    return ast.unparse(node)


def _variables(node: ast.stmt) -> list[str]:
    """Names that a function gives values to, its arguments aside, in their order; none of another definition."""
    if not isinstance(node, ast.FunctionDef):
        return []
    given = {one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    stored = [one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    stored.sort(key=lambda one: (one.lineno, one.col_offset))
    return list(dict.fromkeys(one.id for one in stored if one.id not in given))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _read(file: str) -> _Source:
    return _parsed((KERNELS / f"{file}.py").read_text(encoding="utf-8"))


@functools.cache  # of the text
def _parsed(text: str) -> _Source:
    defined: dict[str, ast.stmt] = {}
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {name.id: node for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}."):
            file = str(node.module).removeprefix(PACKAGE).removeprefix(".")
            for alias in node.names:
                imported[alias.asname or alias.name] = (file, alias.name) if file else (alias.name, "")
    return _Source(defined, imported)
