"""No kernel family is forgotten: each has its tests, its floor in bytes held against what it moves, and its cases."""

import ast
from pathlib import Path

import pytest

from bert_fast import backend

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = sorted(path.stem for path in (ROOT / "bert_fast" / "triton").glob("[!_]*.py"))


def test_families_are_those_of_the_table_of_back_ends() -> None:
    held = {op for op in backend.op_names() if any(one.backend == "triton" for one in backend.implementations(op))}
    assert set(FAMILIES) == held


def kernel_tests(family: str) -> str:
    """The source of a family's tests and of the helpers beside them that they import."""
    folder = ROOT / "tests" / "kernels"
    source = (folder / f"test_{family}.py").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom) and node.level == 1]
    return "\n".join([source, *((folder / f"{node.module}.py").read_text(encoding="utf-8") for node in imports)])


def parametrized_dtypes(source: str) -> set[str]:
    """Names of torch dtypes over which the tests of a file are parametrized, directly or through a list of the file."""
    tree = ast.parse(source)
    lists = {
        target.id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("parametrize") and len(call.args) > 1:
            if "dtype" not in ast.unparse(call.args[0]):
                continue
            values = " ".join([ast.unparse(call.args[1]), *(lists.get(n.id, "") for n in ast.walk(call.args[1])
                                                            if isinstance(n, ast.Name))])  # fmt: skip
            found |= {name for name in ("float32", "float16", "bfloat16") if f"torch.{name}" in values}
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_in_the_interpreter_in_fp32_and_fp16(family: str) -> None:
    source = kernel_tests(family)
    assert "pytest.mark.interpreter" in source
    assert parametrized_dtypes(source) >= {"float32", "float16"}
    assert "assert_close_to_truth" in source, "no comparison with the fp64 reference"


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_counted(family: str) -> None:
    assert "with traffic()" in kernel_tests(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_are_repeated(family: str) -> None:
    assert "repeat" in kernel_tests(family), "no test that two runs give the same bits"


@pytest.mark.parametrize("family", FAMILIES)
def test_full_shapes_on_a_gpu_and_cases(family: str) -> None:
    assert (ROOT / "tests" / "kernels" / f"test_{family}_gpu.py").is_file()
    cases = (ROOT / "benchmarks" / "families" / f"{family}.py").read_text(encoding="utf-8")
    functions = {node.name for node in ast.parse(cases).body if isinstance(node, ast.FunctionDef)}
    assert "cases" in functions


def test_a_family_without_half_precision_would_be_found() -> None:
    only_fp32 = 'D = [torch.float32]\n@pytest.mark.parametrize("dtype", D)\ndef test_a(dtype): ...\n'
    assert parametrized_dtypes(only_fp32) == {"float32"}
    both = only_fp32 + '@pytest.mark.parametrize("dtype", [torch.float16])\ndef test_b(dtype): ...\n'
    assert parametrized_dtypes(both) == {"float32", "float16"}
