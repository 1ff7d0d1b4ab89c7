"""The registry: every case once, well formed, with its entry in `pytest benchmarks`."""

import importlib
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.timing import check_case
from benchmarks.kit.record import ROOT
from benchmarks.registry import CASES, FUSED_CASES, family_names, kernel_cases
from benchmarks.tokenizers.cases import CASES as TOKENIZER_CASES
from tests.benchmarks.conftest import FAMILY

SIZES = ("gpu", "cpu", "small")


def test_names_are_unique_and_say_the_family() -> None:
    for size in SIZES:
        names = [case.name for case in kernel_cases(size)] + [
            case.name for case in (*CASES, *FUSED_CASES, *TOKENIZER_CASES)
        ]
        assert [name for name, count in Counter(names).items() if count > 1] == []
    for name in family_names():
        assert {case.family for case in kernel_cases("gpu", [name])} <= {name}


def test_a_family_without_small_cases_lends_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(FAMILY)
    first, second = list(module.small_cases())[:2]
    monkeypatch.setattr(module, "cases", lambda: iter([first, second]))
    monkeypatch.delattr(module, "small_cases")
    monkeypatch.delattr(module, "cpu_cases")
    assert kernel_cases("small", [FAMILY]) == [first]
    assert kernel_cases("cpu", [FAMILY]) == []


WITH_SMALL = [n for n in family_names() if hasattr(importlib.import_module(f"benchmarks.families.{n}"), "small_cases")]
SMALL = [pytest.param(case, id=case.name) for case in kernel_cases("small", WITH_SMALL)]


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


@pytest.mark.slow
def test_every_case_has_its_entry_for_pytest_benchmark() -> None:
    pytest.importorskip("pytest_benchmark", reason="the package pytest-benchmark is not installed")
    command = [sys.executable, "-m", "pytest", "benchmarks", "--collect-only", "-q"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line.split("[", 1)[1][:-1] for line in done.stdout.splitlines() if "[" in line and "::" in line}
    assert collected >= {case.name for case in (*CASES, *TOKENIZER_CASES, *kernel_cases("gpu"), *kernel_cases("small"))}
