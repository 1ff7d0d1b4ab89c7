"""compute-sanitizer: passed only when it ran everything and found nothing; absent is skipped."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import sanitizer
from benchmarks.gpu.driver import Part, run_parts
from tests.benchmarks.conftest import FAMILY, CpuRun
from tests.patience import PATIENCE_S

RAN = "sanitized cases: _x_fwd_kernel\n"
CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
}


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize(
    ("status", "output", "outcome"),
    [
        (0, RAN + "{clean}", "passed"),
        (0, "{clean}", "error"),  # the cases did not get through
        (1, RAN + "{clean}", "error"),
        (0, RAN, "error"),  # the tool did not say that it looked
        (0, RAN + "========= ERROR SUMMARY: 10 errors\n", "failed"),
        (86, "========= Invalid __global__ write of size 4 bytes\n", "failed"),
        (0, RAN + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", "failed"),
        (13, "========= Unable to find injection library libsanitizer-collection.so\n", "skipped"),
        (1, "========= Error: Device not supported. Please refer to the documentation\n", "skipped"),
        (1, "ModuleNotFoundError: No module named 'torch'\n", "error"),
    ],
)
def test_judging(tool: str, status: int, output: str, outcome: str) -> None:
    found, said = sanitizer.judge(tool, status, output.replace("{clean}", CLEAN[tool]))
    assert found == outcome
    assert said


def run(cpu_run: CpuRun, seconds: float = PATIENCE_S) -> list[str]:
    """Outcomes of the lines of a run under memcheck."""
    command = gpu.command_of("sanitized", cpu_run.file)
    processes = sanitizer.processes("memcheck", command, cpu_run.file.with_name("progress"), cpu_run.run)
    lines = run_parts([Part("memcheck", seconds, processes)], cpu_run.run.recorder, io.StringIO())
    said = [line["outcome"] for line in cpu_run.lines("sanitizer")]
    assert [line["outcome"] for line in lines] == [ENDS.get(outcome) for outcome in said if processes]
    return said


ENDS = {"passed": "ok", "skipped": "skipped", "failed": "failed"}


def test_without_the_tool_it_is_skipped_with_the_reason(cpu_run: CpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "find_tool", lambda: None)
    assert run(cpu_run) == ["skipped"]
    (line,) = cpu_run.lines("sanitizer")
    assert (line["outcome"], line["tool"], line["families"]) == ("skipped", "memcheck", [FAMILY])
    assert "neither on PATH nor in CUDA_HOME" in line["said"]


def test_the_tool_is_found_on_path_and_in_cuda_home(
    write_script: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_script("compute-sanitizer", "exit 0")
    monkeypatch.setenv("CUDA_HOME", str(path.parent.parent))
    monkeypatch.setenv("PATH", "/nonexistent")
    assert sanitizer.find_tool() == str(path)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(path.parent))
    assert sanitizer.find_tool() == str(path)


@pytest.mark.parametrize(
    ("script", "outcome", "said"),
    [
        ("echo '========= Invalid write'; echo '========= ERROR SUMMARY: 1 error'; exit 86", "failed", "Invalid write"),
        ("echo '========= Error: Device not supported. See there'; exit 1", "skipped", "refused: Error: Device not"),
    ],
)
def test_what_the_tool_says_is_the_result(
    script: str, outcome: str, said: str, cpu_run: CpuRun, write_script: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tool = write_script("compute-sanitizer", script)
    monkeypatch.setattr(sanitizer, "find_tool", lambda: str(tool))
    assert run(cpu_run) == [outcome]
    (line,) = cpu_run.lines("sanitizer")
    assert said in line["said"]


PASS = """while [ "$1" != "{python}" ]; do shift; done
"$@" || exit
echo '========= ERROR SUMMARY: 0 errors'"""


def test_behind_a_case_that_crashes_another_process_goes_on(
    cpu_run: CpuRun, write_script: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = write_script("compute-sanitizer", PASS.replace("{python}", sys.executable))
    monkeypatch.setattr(sanitizer, "find_tool", lambda: str(tool))
    monkeypatch.setitem(ENDS, "error", "crashed")
    assert run(cpu_run) == ["error", "passed"]
    first, second = cpu_run.lines("sanitizer")
    assert "/crash" in first["said"] and second["said"] == "ERROR SUMMARY: 0 errors"


def test_what_does_not_end_is_killed_and_named(
    cpu_run: CpuRun, write_script: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = write_script("compute-sanitizer", f"sleep {PATIENCE_S}")
    monkeypatch.setattr(sanitizer, "find_tool", lambda: str(tool))
    monkeypatch.setitem(ENDS, "error", "killed")
    assert run(cpu_run, seconds=1.0) == ["error"]
    (line,) = cpu_run.lines("sanitizer")
    assert line["said"] == "not through in time"
