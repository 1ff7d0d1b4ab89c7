"""compute-sanitizer: passed only when it ran everything and found nothing; absent is skipped."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu import sanitizer as sanitize
from benchmarks.gpu.run import Run
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
    found, said = sanitize.judge(tool, status, output.replace("{clean}", CLEAN[tool]))
    assert found == outcome
    assert said


def run(cpu_run: CpuRun, tool: str = "memcheck", seconds: float = PATIENCE_S) -> list[str]:
    return sanitize.check(tool, [FAMILY], Run.read(cpu_run.file), seconds)


def test_without_the_tool_it_is_skipped_with_the_reason(cpu_run: CpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
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
    assert sanitize.find_tool() == str(path)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(path.parent))
    assert sanitize.find_tool() == str(path)


def test_an_error_that_the_tool_finds_fails(
    cpu_run: CpuRun, write_script: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_script(
        "compute-sanitizer",
        "echo \"$@\"; echo '========= Invalid write'; echo '========= ERROR SUMMARY: 1 error'; exit 86",
    )
    monkeypatch.setattr(sanitize, "find_tool", lambda: str(path))
    assert run(cpu_run) == ["failed"]
    (line,) = cpu_run.lines("sanitizer")
    assert line["outcome"] == "failed"
    assert "Invalid write" in line["said"]


def test_the_cases_that_run_under_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["--cases", "--families", "dropout_add_layer_norm", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(sanitize.THROUGH)


PASS = """while [ "$1" != "{python}" ]; do shift; done
"$@" || exit
echo '========= ERROR SUMMARY: 0 errors'"""


def test_a_process_that_crashes_is_started_again_behind_the_case(
    cpu_run: CpuRun, write_script: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = write_script("compute-sanitizer", PASS.replace("{python}", sys.executable))
    monkeypatch.setattr(sanitize, "find_tool", lambda: str(tool))
    assert run(cpu_run) == ["error", "passed"]
    first, second = cpu_run.lines("sanitizer")
    assert "/crash" in first["said"] and second["said"] == "ERROR SUMMARY: 0 errors"


def test_what_does_not_end_is_killed_and_named(
    cpu_run: CpuRun, write_script: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = write_script("compute-sanitizer", f"sleep {PATIENCE_S}")
    monkeypatch.setattr(sanitize, "find_tool", lambda: str(tool))
    assert run(cpu_run, seconds=1.0) == ["error"]
    (line,) = cpu_run.lines("sanitizer")
    assert "not through within 1 s" in line["said"]


def test_wrong_names_are_named() -> None:
    with pytest.raises(SystemExit, match="--tools: expected some of memcheck,racecheck, got leakcheck"):
        sanitize.main(["--tools", "leakcheck"])
    with pytest.raises(SystemExit, match=r"--families: expected some of .*attention.*, got atention"):
        sanitize.main(["--families", "atention"])
