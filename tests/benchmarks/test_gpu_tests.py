"""The pytest plugin of `make gpu`: order of tests, and a line for each as it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.pytest_plugin import in_order
from benchmarks.kit.record import ROOT
from tests.benchmarks.conftest import CpuRun

TESTS = """
import pytest, torch

@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values(dtype):
    assert dtype != torch.float16, "two runs differ"

def test_skipped():
    pytest.skip("no reason")

@pytest.fixture
def broken():
    raise RuntimeError("out of memory")

def test_broken(broken):
    pass

def test_kills_the_process():
    import os
    os._exit(9)
"""


def test_order_is_by_dtype_then_by_width_then_in_turn_between_files() -> None:
    names = [
        ("a", "test[float32]"), ("a", "test[float16]"), ("a", "test[bfloat16-1]"), ("a", "test[bfloat16-2]"),
        ("b", "test"), ("b", "test[bf16-1]"), ("b", "test[bf16-2]"), ("b", "test[bf16-768]"),
    ]  # fmt: skip
    assert [names[i] for i in in_order(names)] == [
        ("b", "test[bf16-768]"), ("a", "test[bfloat16-1]"), ("b", "test[bf16-1]"), ("a", "test[bfloat16-2]"),
        ("b", "test[bf16-2]"), ("a", "test[float16]"), ("a", "test[float32]"), ("b", "test"),
    ]  # fmt: skip


@pytest.mark.slow
def test_several_processes_write_each_line_once(cpu_run: CpuRun, tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="the package pytest-xdist is not installed")
    (tmp_path / "test_x.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable, "-m", "pytest", "-n", "2", "-p", "benchmarks.gpu.pytest_plugin", "--gpu-run", str(cpu_run.file),
        "test_x.py",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted((line["test"], line["outcome"]) for line in cpu_run.lines("test"))
    assert lines == [("test_x.py::test_a", "passed"), ("test_x.py::test_b", "passed")]


@pytest.mark.slow
def test_a_line_for_each_test_survives_a_crash(cpu_run: CpuRun, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.pytest_plugin", "--gpu-run", str(cpu_run.file),
        "test_x.py",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stdout + done.stderr
    lines = cpu_run.lines("test")
    assert [(line["test"].split("::")[1], line["outcome"]) for line in lines] == [
        ("test_values[dtype2]", "passed"),
        ("test_values[dtype1]", "failed"),
        ("test_values[dtype0]", "passed"),
        ("test_skipped", "skipped"),
        ("test_broken", "failed"),
    ]
    assert "two runs differ" in lines[1]["message"]
    assert "out of memory" in lines[4]["message"]
