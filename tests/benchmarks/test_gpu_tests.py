"""The pytest plugin of `make gpu`: order of tests, and a line for each as it ends."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import gpu_test_files
from benchmarks.gpu.driver import Part, Process, run_parts
from benchmarks.gpu.pytest_plugin import FIRST, in_order
from benchmarks.kit.results import ROOT, Recorder
from tests.benchmarks.conftest import CpuRun
from tests.patience import PATIENCE_S

# Other plugins than those that `make gpu` asks for take half of the time.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
WITH_PLUGIN = (sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.pytest_plugin")

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


def test_order_is_whole_models_then_by_dtype_then_by_width_then_in_turn_between_files() -> None:
    names = [
        ("a", "test[float32]"), ("a", "test[float16]"), ("a", "test[bfloat16-1]"), ("a", "test[bfloat16-2]"),
        ("b", "test"), ("b", "test[bf16-1]"), ("b", "test[bf16-2]"), ("b", "test[bf16-768]"),
        (f"/x/{FIRST[1]}", "test"), (f"/x/{FIRST[0]}", "test[bf16]"),
    ]  # fmt: skip
    assert [names[i] for i in in_order(names)] == [
        (f"/x/{FIRST[0]}", "test[bf16]"), (f"/x/{FIRST[1]}", "test"),
        ("b", "test[bf16-768]"), ("a", "test[bfloat16-1]"), ("b", "test[bf16-1]"), ("a", "test[bfloat16-2]"),
        ("b", "test[bf16-2]"), ("a", "test[float16]"), ("a", "test[float32]"), ("b", "test"),
    ]  # fmt: skip


@pytest.mark.slow
def test_several_processes_write_each_line_once(cpu_run: CpuRun, tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="the package pytest-xdist is not installed")
    (tmp_path / "test_x.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [*WITH_PLUGIN, "-p", "xdist", "-n", "2", "--gpu-run", str(cpu_run.file), "test_x.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted((line["test"], line["outcome"]) for line in cpu_run.lines("test"))
    assert lines == [("test_x.py::test_a", "passed"), ("test_x.py::test_b", "passed")]


@pytest.mark.slow
def test_a_line_for_each_test_survives_a_crash(cpu_run: CpuRun, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [*WITH_PLUGIN, "--gpu-run", str(cpu_run.file), "test_x.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )
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


def test_what_comes_first_is_there_and_marked() -> None:
    assert set(FIRST) <= set(gpu_test_files())


UNUSABLE = """
import pytest
from benchmarks.gpu import pytest_plugin

def test_a(): pass

def test_b():
    pytest_plugin.is_usable = lambda device: False
    assert not "an illegal access"

def test_c(): pass
def test_d(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "two"])
def test_behind_a_test_that_leaves_the_device_unusable_another_process_goes_on(
    workers: tuple[str, ...], cpu_run: CpuRun, tmp_path: Path
) -> None:
    if workers:
        pytest.importorskip("xdist", reason="the package pytest-xdist is not installed")
    (tmp_path / "test_x.py").write_text(UNUSABLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    progress = tmp_path / "progress.jsonl"
    command = (
        *WITH_PLUGIN, *workers, "--gpu-run", str(cpu_run.file), "--gpu-progress", str(progress),
        "-c", str(tmp_path / "pytest.ini"), str(tmp_path / "test_x.py"),
    )  # fmt: skip
    process = Process("tests", command, ENVIRONMENT, progress)
    recorder = Recorder(cpu_run.results, {"run": "this"})
    parts = run_parts([Part("tests", PATIENCE_S, (process,))], recorder, io.StringIO())
    outcomes = {
        (line["test"].split("::")[1], line["outcome"]) for line in cpu_run.lines("test") if "::" in line["test"]
    }
    assert outcomes == {("test_a", "passed"), ("test_b", "failed"), ("test_c", "passed"), ("test_d", "passed")}
    expected = ["failed"] if workers else ["crashed", "ok"]
    assert [line["outcome"] for line in parts] == expected
    assert workers or "test_b" in parts[0]["case"]
