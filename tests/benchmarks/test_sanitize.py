"""compute-sanitizer: passed only when it ran everything and found nothing; absent is skipped."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu import sanitizer as sanitize
from tests.benchmarks.conftest import FAMILY, CpuRun

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


def run(cpu_run: CpuRun, tool: str = "memcheck") -> int:
    return sanitize.main([tool, "--family", FAMILY, "--run", str(cpu_run.file)])


def test_without_the_tool_it_is_skipped_with_the_reason(cpu_run: CpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
    assert run(cpu_run) == 0
    (line,) = cpu_run.lines("sanitizer")
    assert (line["outcome"], line["tool"], line["family"]) == ("skipped", "memcheck", FAMILY)
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
    assert run(cpu_run) == 1
    (line,) = cpu_run.lines("sanitizer")
    assert line["outcome"] == "failed"
    assert "Invalid write" in line["said"]


def test_the_cases_that_run_under_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["cases", "--family", "dropout_add_layer_norm", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(sanitize.THROUGH)
