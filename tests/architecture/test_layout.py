"""One op, one name, the same file name in every folder; nothing in files that does not belong."""

import ast
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from bert_fast import backend, native
from bert_fast._version import __version__

ROOT = Path(__file__).resolve().parents[2]
CODE_SUFFIXES = {".py", ".cpp", ".h", ".cu"}


def repository_files() -> list[Path]:
    """Files under version control, or not ignored by it; without git, all but the hidden and built ones."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        paths = [ROOT / name for name in names if name]
    except (FileNotFoundError, subprocess.CalledProcessError):
        skipped = {"build", "dist", "__pycache__"}
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(part in skipped or part.startswith(".") for part in path.relative_to(ROOT).parts)
        ]
    return sorted(path for path in paths if path.is_file())


FILES = repository_files()
SOURCES = [path for path in FILES if path.suffix in CODE_SUFFIXES]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parameters(path: Path, name: str) -> list[str]:
    """Parameter names of a function defined in a file, or imported there from another file of bert_fast."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            arguments = node.args
            return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return parameters(ROOT / f"{(node.module or '').replace('.', '/')}.py", original)
    raise AssertionError(f"{relative(path)} defines no {name}")


@pytest.mark.parametrize("op", backend.op_names())
def test_op_has_its_files(op: str) -> None:
    implementations = backend.implementations(op)
    assert implementations[-1].backend == "reference", "the choice always ends at the reference"
    expected = [ROOT / "bert_fast" / one.backend / f"{op}.py" for one in implementations]
    assert [one.module for one in implementations] == [relative(path)[:-3].replace("/", ".") for path in expected]
    expected.append(ROOT / "bert_fast" / "ops" / f"{op}.py")
    if any(one.backend == "triton" for one in implementations):
        expected.append(ROOT / "docs" / "kernels" / f"{op}.md")
        expected.append(ROOT / "tests" / "kernels" / f"test_{op}.py")
    missing = [relative(path) for path in expected if not path.is_file()]
    assert not missing, f"{op}: no {', '.join(missing)}"
    assert any((ROOT / "tests").rglob(f"test_{op}*.py")), f"{op}: no test file test_{op}*.py"


# Ops that are no function with a gradient: what they have instead of a forward and a backward.
FUNCTIONS = {"optimizer": ["global_norm", "adamw_step", "lamb_step"], "linear_int8": ["linear_int8_fwd"]}
SIGNATURES = [(op, name) for op in backend.op_names() for name in FUNCTIONS.get(op, [f"{op}_fwd", f"{op}_bwd"])]


@pytest.mark.parametrize(("op", "function"), SIGNATURES)
def test_op_has_one_signature(op: str, function: str) -> None:
    found = {
        one.backend: parameters(ROOT / f"{one.module.replace('.', '/')}.py", function)
        for one in backend.implementations(op)
    }
    assert all(names == found["reference"] for names in found.values()), found


# Modules that are a face themselves: all that they define is public.
FACES = {"bert_fast/errors.py", "bert_fast/models/outputs.py"}


def test_only_faces_list_their_names() -> None:
    listing = {
        relative(path)
        for path in SOURCES
        if path.suffix == ".py" and re.search(r"^__all__\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {name for name in listing if not name.endswith("/__init__.py")} == FACES


def test_only_bindings_know_python() -> None:
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in CODE_SUFFIXES and path.parent.name != "bindings":
            assert not re.search(r"#\s*include\s*[<\"](pybind11|Python\.h|torch)", path.read_text(encoding="utf-8")), (
                path
            )


# Parts of the core that stand on another one: batches, threads and tables of characters are WordPiece's.
STANDS_ON = {"unigram": {"wordpiece"}}


def test_parts_of_the_core_do_not_know_each_other() -> None:
    faces = {"api", "bindings", "tests"}  # they know the parts, whose headers the parts do not include
    parts = [path for path in (ROOT / "csrc").iterdir() if path.is_dir() and path.name not in faces]
    for part in parts:
        known = {part.name, *STANDS_ON.get(part.name, ())}
        others = "|".join([*(other.name for other in parts if other.name not in known), *faces, "bert_fast"])
        for path in part.rglob("*"):
            if path.suffix in CODE_SUFFIXES:
                assert not re.search(rf'#\s*include\s*"({others})/', path.read_text(encoding="utf-8")), path


# Where packages and models are fetched from is the business of pip's configuration. The names are put together here so
# that this file does not hold them.
HOSTS = [".".join(words) for words in (("pypi", "org"), ("pythonhosted", "org"), ("pypi", "python", "org"),
    ("download", "pytorch", "org"), ("anaconda", "org"), ("npmjs", "org"), ("crates", "io"), ("proxy", "golang", "org"),
    ("docker", "io"), ("ghcr", "io"))]  # fmt: skip


def test_no_package_host_is_named() -> None:
    wrong = []
    for path in FILES:
        content = path.read_bytes().lower()
        wrong += [f"{relative(path)}: {host}" for host in HOSTS if host.encode() in content]
    assert not wrong, wrong


def uses_environment(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in {"environ", "getenv", "putenv"}
    )


def test_environment_is_read_in_one_place() -> None:
    wrong = []
    for path in (ROOT / "bert_fast").rglob("*.py"):
        if path.name != "env.py" and path.parent.name != "cli":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            wrong += [f"{relative(path)}:{node.lineno}" for node in nodes if uses_environment(node)]
    assert not wrong, f"bert_fast/env.py reads the environment, once: {wrong}"


TOLERANCE_ARGUMENTS = {"atol", "rtol", "abs", "rel", "delta"}


def literal_tolerances(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            value = keyword.value
            if keyword.arg in TOLERANCE_ARGUMENTS and isinstance(value, ast.Constant) and value.value not in (0, 0.0):
                found.append(f"{relative(path)}:{value.lineno}: {keyword.arg}={value.value}")
    return found


def test_tolerances_live_in_one_table() -> None:
    paths = [path for path in SOURCES if path.suffix == ".py" and relative(path).startswith("tests/")]
    wrong = [problem for path in paths for problem in literal_tolerances(path)]
    assert not wrong, f"tolerances belong in bert_fast/testing/tolerances.py: {wrong}"


def test_one_version_number() -> None:
    assert metadata.version("bert_fast") == __version__, "stale metadata: `pip install -e .`"
    extension = native.load()
    if extension is not None:
        assert extension.__version__ == __version__, "stale extension: `python setup.py build_ext --inplace`"
    assert re.search(
        rf"^## \[({re.escape(__version__)}|Unreleased)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
