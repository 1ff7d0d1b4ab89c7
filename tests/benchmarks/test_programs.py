"""The digest of a kernel changes with what the kernel computes, and with nothing else."""

import ast
from pathlib import Path

import pytest

from benchmarks.kit import programs

MATH = '''
import triton
import triton.language as tl

SCALE = tl.constexpr(2.0)

@triton.jit
def helper(x):
    """Doubles."""
    return x * SCALE
'''
KERNEL = '''
import triton
import triton.language as tl
from bert_fast.triton import _other
from bert_fast.triton._math import helper as doubled

NAMES = ["n"]

@triton.jit(do_not_specialize=NAMES)
def _x_kernel(x_ptr, n, COLS: tl.constexpr):
    """Doubles a row."""
    cols = tl.arange(0, COLS)
    row = tl.load(x_ptr + cols, mask=cols < n)
    tl.store(x_ptr + cols, doubled(row) + _other.ONE)

def launch(x):
    _x_kernel[(1,)](x, 3, COLS=4)
'''
OTHER = "ONE = 1\nTWO = 2\n"


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("_math", MATH), ("x", KERNEL), ("_other", OTHER)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(programs, "KERNELS", tmp_path)
    return tmp_path


def digest() -> str:
    return programs.digest("x", "_x_kernel")


def test_what_a_kernel_is_made_of(kernels: Path) -> None:
    assert programs.files() == ["x"] and programs.kernel_names("x") == ["_x_kernel"]
    reached = {("x", "_x_kernel"), ("x", "NAMES"), ("_math", "helper"), ("_math", "SCALE"), ("_other", "ONE")}
    assert programs.made_of("x", "_x_kernel") == reached


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("x", '    """Doubles a row."""\n', "    # a row\n"),
        ("x", "cols", "columns"),
        ("x", "row", "cols2"),
        ("x", "tl.arange(0, COLS)", "(tl.arange(\n        0, COLS))"),
        ("x", "x, 3, COLS=4", "x, 5, COLS=8"),
        ("x", "def launch(x):", "def launch(x, y=1):"),
        ("_math", '    """Doubles."""\n', ""),
        ("_other", "TWO = 2", "TWO = 3"),
    ],
)
def test_what_leaves_it_alone(file: str, old: str, new: str, kernels: Path) -> None:
    before, path = digest(), kernels / f"{file}.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert digest() == before


def test_a_helper_may_move(kernels: Path) -> None:
    before = digest()
    (kernels / "_moved.py").write_text(MATH)
    (kernels / "_math.py").write_text("from bert_fast.triton._moved import helper\n")
    assert digest() == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("x", "cols < n", "cols <= n"),
        ("x", "doubled(row)", "row"),
        ("x", "n, COLS", "m, n, COLS"),
        ("x", '["n"]', "[]"),
        ("x", "tl.load(x_ptr + cols, mask=cols < n)", "tl.load(x_ptr + cols)"),
        ("x", "_other.ONE", "_other.TWO"),
        ("_math", "2.0", "2"),
        ("_math", "x * SCALE", "SCALE * x"),
        ("_other", "ONE = 1", "ONE = 2"),
    ],
)
def test_what_changes_it(file: str, old: str, new: str, kernels: Path) -> None:
    before, path = digest(), kernels / f"{file}.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert digest() != before


class _Renamed(ast.NodeTransformer):
    """Other names for a function's variables."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        given = {one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
        stored = {one.id for one in names if isinstance(one.ctx, ast.Store)} - given
        for one in names:
            one.id += "_renamed" * (one.id in stored)
        return node


def test_no_comment_and_no_name_of_a_variable_is_in_those_that_ship(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of kernels without comments and layout, all variables renamed: no digest is another."""
    before = programs.kernel_digests()
    assert len(before) == len(set(before.values())) > 30
    for path in programs.KERNELS.glob("*.py"):
        (tmp_path / path.name).write_text(ast.unparse(_Renamed().visit(ast.parse(path.read_text()))))
    assert "_renamed" in (tmp_path / "layer_norm.py").read_text()
    monkeypatch.setattr(programs, "KERNELS", tmp_path)
    assert programs.kernel_digests() == before
