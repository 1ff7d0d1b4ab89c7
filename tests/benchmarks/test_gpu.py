"""The driver of `make gpu`, with parts that need no GPU: budgets hold, nothing is lost, what is left is killed."""

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.__main__ import parts_of
from benchmarks.gpu.driver import Part, Process, run_parts
from benchmarks.gpu.summary import summary
from benchmarks.kit.record import ROOT, Recorder, read_lines
from benchmarks.registry import family_names
from tests.benchmarks.conftest import FAMILY, CpuRun
from tests.patience import PATIENCE_S

FAMILIES = {name: number for number, name in enumerate(family_names())}


def python(name: str, code: str) -> Process:
    return Process(name, (sys.executable, "-c", code))


def shell(name: str, code: str, *arguments: str) -> Process:
    """A process that is up at once, also on a busy machine: budgets here are a few seconds."""
    return Process(name, ("sh", "-c", code, *arguments))


def note(recorder: Recorder, number: int) -> str:
    """Shell code that writes a line of results."""
    return f"""echo '{{"kind": "note", "n": {number}}}' >> '{recorder.path}'"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "results.jsonl", {"run": 1})


def test_a_part_that_overruns_is_killed_with_all_it_started_and_later_parts_run(
    recorder: Recorder, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    hangs = f"{note(recorder, 1)}; trap '' TERM; sleep {PATIENCE_S} & echo $! > '{pid_file}'; wait"
    parts = [
        Part("hangs", 2.0, (shell("hangs", hangs), shell("quick", "echo hello"))),
        Part("fails", 5.0, (shell("fails", "exit 3"),)),
        Part("works", 5.0, (shell("works", note(recorder, 2)),)),
    ]
    log = io.StringIO()
    start = time.monotonic()
    lines = run_parts(parts, recorder, log)
    assert time.monotonic() - start < PATIENCE_S / 2
    outcomes = {line["process"]: (line["outcome"], line["status"]) for line in lines}
    assert outcomes["quick"] == ("ok", 0)
    assert outcomes["fails"] == ("failed", 3)
    assert outcomes["works"] == ("ok", 0)
    assert outcomes["hangs"][0] == "killed"
    assert not is_alive(int(pid_file.read_text()))
    stored = list(read_lines(recorder.path))
    assert [line["n"] for line in stored if line["kind"] == "note"] == [1, 2], "what came before the kill is kept"
    assert [line for line in stored if line["kind"] == "part"] == lines
    assert "  quick: hello\n" in log.getvalue()
    text = summary(recorder, lines, ["x: _x_kernel (12)"])
    assert "killed" in text and "x: _x_kernel (12)" in text


def test_unused_time_goes_to_later_parts(recorder: Recorder) -> None:
    show = shell("show", 'echo "$0"', "{seconds}")
    log = io.StringIO()
    lines = run_parts([Part("first", 30.0, (show,)), Part("second", 20.0, (show,))], recorder, log)
    assert 45 < lines[1]["allowed_s"] <= 50
    told = [float(line.split(": ")[1]) for line in log.getvalue().splitlines() if line.startswith("  show: ")]
    assert 26 < told[0] <= 27 and told[1] < lines[1]["allowed_s"], "a part is told to stop before it would be killed"


def test_processes_of_a_part_run_at_once(recorder: Recorder, tmp_path: Path) -> None:
    # Each waits for the other's file: one after the other would both be killed.
    wait = "touch '{mine}'; until [ -e '{other}' ]; do sleep 0.01; done"
    a, b = tmp_path / "a", tmp_path / "b"
    both = (shell("a", wait.format(mine=a, other=b)), shell("b", wait.format(mine=b, other=a)))
    assert {line["outcome"] for line in run_parts([Part("both", 20.0, both)], recorder, io.StringIO())} == {"ok"}


def test_a_driver_that_is_ended_ends_what_it_runs(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
import io, signal, sys
from pathlib import Path
from benchmarks.gpu.driver import *
from benchmarks.kit.record import Recorder
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
child = "import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
part = Part("p", 600.0, (Process("p", (sys.executable, "-c", child)),))
run_parts([part], Recorder(Path({str(tmp_path / "r")!r})), io.StringIO())
"""
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    limit = time.monotonic() + PATIENCE_S
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < limit:
        time.sleep(0.05)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(PATIENCE_S) == 1
    assert not is_alive(int(pid_file.read_text()))


def test_all_parts_fit_into_nine_minutes_and_know_every_family(tmp_path: Path) -> None:
    parts = parts_of(tmp_path / "run.json", FAMILIES, cores=16)
    assert sum(part.budget_s for part in parts) <= 520.01
    names = [process.name for part in parts for process in part.processes]
    for family in family_names():
        for part in ("verify", "compile", "time", "memcheck", "racecheck"):
            assert f"{part} {family}" in names
    seconds = {part.name: part.budget_s for part in parts if part.name.startswith("time ")}
    assert sorted(seconds, key=seconds.__getitem__) == [f"time {family}" for family in FAMILIES], (
        "more cases, more time"
    )
    order = [part.name.split()[0] for part in parts]
    assert order == sorted(order, key=order.index)
    assert order.index("verify") < order.index("tests") < order.index("time") < order.index("sanitizer")


def test_every_file_with_gpu_tests_is_run() -> None:
    assert "tests/kernels/test_dropout_add_layer_norm_gpu.py" in gpu.gpu_test_files()


@pytest.mark.slow
def test_the_real_parts_from_end_to_end_on_a_cpu(
    cpu_run: CpuRun, write_script: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = write_script(
        "compute-sanitizer",
        'while [ "$1" != "' + sys.executable + '" ]; do shift; done\n"$@" || exit\n'
        "echo '========= ERROR SUMMARY: 0 errors'\n"
        "echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'",
    )
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    # What works must not be killed, however busy the machine is.
    parts = [
        dataclasses.replace(part, budget_s=10 * part.budget_s)
        for part in parts_of(cpu_run.file, {FAMILY: 3}, 2) if part.name not in {"extension", "tests"}
    ]  # fmt: skip
    recorder = Recorder(cpu_run.results, {"run": "this", "gpu": None})
    lines = run_parts(parts, recorder, io.StringIO())
    outcomes = {line["process"].split()[0]: line["outcome"] for line in lines}
    # Wrong cases make `verify` fail; the crashing one ends the sanitizer's process.
    assert outcomes == {
        "verify": "failed", "ceilings": "ok", "compile": "ok", "prepare": "ok", "time": "ok", "peers": "ok",
        "steps": "ok", "runs": "ok", "gemm": "ok", "tiles": "ok", "models": "ok", "memcheck": "failed",
        "racecheck": "failed",
    }  # fmt: skip
    text = summary(recorder, lines, [])
    assert "cases: 4 red, 3 green" in text
    assert "red: kernel/tests.benchmarks.fake_family/8x16/fp32/wrong: wrong: worst error 1.0, allowed 0.1" in text
    assert "sanitizer: 2 error" in text
    assert any("/right" in line and "fwd" in line and "compiled" in line for line in text.splitlines())
    assert text.endswith("owed: nothing")


@pytest.mark.parametrize(("status", "is_green"), [(0, True), (1, True), (0, False)])
def test_the_command_names_files_after_the_gpu_and_says_what_failed(
    status: int, is_green: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"run": "made up", "gpu": "Made up 3000 (test)"}

    def parts(run_file: Path, families: dict[str, int], cores: int) -> list[Part]:
        code = (
            "from pathlib import Path; from benchmarks.gpu.run import Run\n"
            f"run = Run.read(Path({str(run_file)!r}))\n"
            f"run.recorder.write('verify', case='c', ok={is_green}, error='wrong', family='x')"
        )
        return [Part("a", 90.0, (python("a", code),)), Part("b", 90.0, (python("b", f"raise SystemExit({status})"),))]

    monkeypatch.setattr(gpu, "_probe", lambda commit: (environment | {"commit": commit}, {"x": 1}))
    monkeypatch.setattr(gpu, "parts_of", parts)
    monkeypatch.setattr(gpu.status, "RESULTS", tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        done = gpu.main(["--results", str(tmp_path / "new"), "--commit", "c0ffee", "--minutes", "4.5"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert done == (0 if status == 0 and is_green else 1)
    lines = list(read_lines(tmp_path / "new" / "made-up-3000--test-.jsonl"))
    assert [line["kind"] for line in lines] == ["verify", "part", "part"]
    assert {line["commit"] for line in lines} == {"c0ffee"}
    assert lines[1]["allowed_s"] <= 45, "budgets are scaled to the minutes given"
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "new" / "made-up-3000--test-.log").read_text()
    assert ("red: c: wrong" in shown) == (not is_green)
    assert "_dropout_add_layer_norm_fwd_kernel" in shown, "what is still owed"


def test_without_a_device_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "_probe", lambda commit: None)
    assert gpu.main(["--results", str(tmp_path / "results")]) == 1
    assert "nothing was run" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_the_documentation_has_the_parts_and_budgets(tmp_path: Path) -> None:
    budgets: dict[str, float] = {}
    for part in parts_of(tmp_path / "run.json", FAMILIES, cores=16):
        name = part.name.split()[0]
        budgets[name] = budgets.get(name, 0.0) + part.budget_s
    rows = re.findall(r"^\| (\w+) \| (\d+) \|", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    assert [(name, int(seconds)) for name, seconds in rows] == [(n, round(s)) for n, s in budgets.items()]
