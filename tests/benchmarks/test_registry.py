"""The registry: every case once, and well formed."""

import ast
import functools
import importlib
import operator
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.kernels.case import KernelCase, Use, installed
from benchmarks.kernels.timing import check_case
from benchmarks.kit.results import ROOT
from benchmarks.registry import CASES, FUSED_CASES, family_names, kernel_cases
from benchmarks.tokenizers.cases import CASES as TOKENIZER_CASES
from tests.benchmarks.conftest import FAMILY

EVERY_USE = ~Use(0)
SMALL = [pytest.param(case, id=case.name) for case in kernel_cases("small")]


def test_names_are_unique_and_say_the_family() -> None:
    cases = [*kernel_cases(EVERY_USE), *CASES, *FUSED_CASES, *TOKENIZER_CASES]
    assert [name for name, count in Counter(case.name for case in cases).items() if count > 1] == []
    for name in family_names():
        assert {case.family for case in kernel_cases(EVERY_USE, [name])} == {name}


@pytest.mark.parametrize("name", family_names())
def test_a_case_says_what_it_is_for(name: str) -> None:
    """One without a use would never run; all but the witness's own are of every family."""
    uses = [case.uses for case in importlib.import_module(f"benchmarks.families.{name}").cases()]
    assert all(uses)
    assert (EVERY_USE & ~Use.WITNESS) in functools.reduce(operator.or_, uses)


def test_cases_are_handed_out_by_use() -> None:
    names = [case.variant for case in kernel_cases(Use.CPU, [FAMILY])]
    assert names == ["right"] == [case.variant for case in kernel_cases("cpu", [FAMILY])]
    both = kernel_cases(Use.CPU | Use.SMALL, [FAMILY])
    assert len(both) == len(kernel_cases("small", [FAMILY])) > 1, "once, of two uses"
    assert kernel_cases("witness", [FAMILY]) == []
    with pytest.raises(KeyError, match="LARGE"):
        kernel_cases("large", [FAMILY])


def test_cases_are_declared_by_families_alone() -> None:
    """A case elsewhere would be a second list, which the others do not know of."""

    def declared(path: Path) -> set[str]:
        calls = [node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        names = {getattr(call, "id", getattr(call, "attr", "")) for call in calls}
        return names & {"KernelCase", "AotCase"}

    files = [path for folder in ("bert_fast", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = {path.relative_to(ROOT): names for path in files if (names := declared(path))}
    assert {path.stem for path in found} == set(family_names())
    assert {path.parent for path in found} == {Path("benchmarks/families")}, found


@pytest.mark.parametrize("case", SMALL)
def test_a_small_case_is_a_whole_case_on_a_cpu(case: KernelCase) -> None:
    checked = check_case(case, torch.device("cpu"))
    assert checked["ok"], checked["error"]
    problem = case.make(torch.device("cpu"))
    modes = [{"step"}] if problem.upstream is None else [{"fwd", "bwd"}, {"fwd_bwd"}]
    assert set(problem.bytes_moved) in modes and set(problem.flops) <= set(problem.bytes_moved)
    assert all(size > 0 for size in problem.bytes_moved.values())
    for function, provider in ((problem.fast, "bert_fast"), (problem.eager, "eager"), (problem.eager, "compiled")):
        inputs, upstream = problem.arguments_of(provider)
        output = function(*inputs)
        if output is not None and upstream is not None:
            several = (output, upstream) if isinstance(output, tuple) else ([output], [upstream])
            for one, gradient in zip(*several, strict=True):
                assert (one.shape, one.dtype) == (gradient.shape, problem.fast(*problem.inputs).dtype)


def test_contestants_are_the_libraries_that_import(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("a_library")
    monkeypatch.setattr(library, "scaled", lambda x, factor: factor * x, raising=False)
    monkeypatch.setitem(sys.modules, "a_library", library)
    found = installed(
        here=("a_library:scaled", lambda f, x: f(x, 3)),
        older=("a_library:not_yet", lambda f, x: f(x)),
        absent=("no_such_library:scaled", lambda f, x: f(x)),
    )
    assert found.keys() == {"here"} and found["here"](7) == 21
