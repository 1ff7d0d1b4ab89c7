"""The driver of `make gpu`, with parts that need no GPU: budgets hold, nothing is lost, what is left is killed."""

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.__main__ import parts_of
from benchmarks.gpu.driver import Part, Process, run_parts
from benchmarks.gpu.run import process_environment
from benchmarks.gpu.summary import main as summary_main
from benchmarks.gpu.summary import summary
from benchmarks.kit.results import ROOT, Recorder, read_lines
from benchmarks.registry import family_names
from tests.benchmarks.conftest import FAMILY, CpuRun
from tests.patience import PATIENCE_S

FAMILIES = list(family_names())


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
    show = shell("show", 'echo "$0"', "{until}")
    log = io.StringIO()
    start = time.monotonic()
    lines = run_parts([Part("first", 30.0, (show,)), Part("second", 20.0, (show,))], recorder, log)
    assert 45 < lines[1]["allowed_s"] <= 50
    told = [float(line.split(": ")[1]) for line in log.getvalue().splitlines() if line.startswith("  show: ")]
    assert 26.9 < told[0] - start < 28 and 46.9 < told[1] - start < 48, "told to stop before it would be killed"


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
from benchmarks.kit.results import Recorder
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
        for part in ("verify", "compile"):
            assert f"{part} {family}" in names
    order = [part.name for part in parts]
    assert len(order) == len(set(order))
    assert [[p.name for p in part.processes] for part in parts if part.name == "time"] == [["time"]], (
        "one process times all families: starting takes seconds"
    )
    assert order.index("verify") < order.index("tests") < order.index("time") < order.index("steps")
    assert "extension" in [process.name for process in parts[0].processes], "beside what needs no extension"


@pytest.mark.parametrize(("cores", "workers"), [(2, None), (3, None), (4, "2"), (8, "6"), (16, "12"), (64, "12")])
def test_tests_run_in_as_many_processes_as_cores_allow(cores: int, workers: str | None, tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="the package pytest-xdist is not installed")
    (tests,) = (p for part in parts_of(tmp_path / "run.json", FAMILIES, cores) for p in part.processes
                if p.name == "tests")  # fmt: skip
    told = tests.command[tests.command.index("-n") + 1] if "-n" in tests.command else None
    assert told == workers


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        ("steps", ["ceilings", "steps"]),
        ("peers", ["verify", "ceilings", "time", "peers"]),
        ("gemm,time", ["verify", "ceilings", "time", "gemm"]),
    ],
)
def test_some_parts_and_those_that_they_need(names: str, kinds: list[str], tmp_path: Path) -> None:
    parts = gpu.some(parts_of(tmp_path / "run.json", ["attention"], cores=16), names)
    assert [part.name for part in parts] == kinds
    assert all(process.name.split()[-1] != "mlp" for part in parts for process in part.processes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--parts", "step"), "--parts: expected some of verify,.*steps.*, got step"),
        (("--families", "mlp,x"), "--families: expected some of attention,mlp, got x"),
        (("--parts", "smoke,verify"), "--parts: expected some of smoke, got verify"),
    ],
)
def test_parts_and_families_that_are_not_there_are_named(
    options: tuple[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "probe", lambda device, commit: {"run": "r", "gpu": "g"})
    monkeypatch.setattr(gpu, "family_names", lambda: ["attention", "mlp"])
    with pytest.raises(SystemExit, match=message):
        gpu.main(["--results", str(tmp_path), *options])


CRASHES = """
import os, sys
from pathlib import Path
from benchmarks.kit.crashes import Progress, leave
progress = Progress(Path(sys.argv[1]))
for name in ("a", "b", "c", "d"):
    if name in progress.begun():
        continue
    progress.begin(name)
    print("runs", name, flush=True)
    if name == "b":
        os.abort()
    if name == "c":
        leave()
    progress.end(name)
"""


def test_behind_a_case_that_crashes_another_process_goes_on(recorder: Recorder, tmp_path: Path) -> None:
    """By a signal, and as a process leaves whose device no longer answers."""
    progress = tmp_path / "progress.jsonl"
    process = Process("p", (sys.executable, "-c", CRASHES, str(progress)), progress=progress)
    log = io.StringIO()
    lines = run_parts([Part("p", PATIENCE_S, (process,))], recorder, log)
    assert [(line["outcome"], line.get("case")) for line in lines] == [("crashed", "b"), ("crashed", "c"), ("ok", None)]
    assert re.findall(r"runs (\w)", log.getvalue()) == ["a", "b", "c", "d"], "none is left out, none runs twice"
    assert "p: crashed in b" in summary(recorder, lines, [])


def test_a_process_that_crashes_before_it_begins_a_case_is_given_up(recorder: Recorder, tmp_path: Path) -> None:
    code = "import os; os.abort()"
    process = Process("p", (sys.executable, "-c", code), progress=tmp_path / "progress.jsonl")
    lines = run_parts([Part("p", PATIENCE_S, (process,))], recorder, io.StringIO())
    assert [line["outcome"] for line in lines] == ["crashed"]


PLANS = """
import os, sys
from pathlib import Path
from benchmarks.kit.crashes import Progress
names, well = sys.argv[2].split(","), sys.argv[3].split(",")
progress = Progress(Path(sys.argv[1]))
progress.plan(names)
for name in names:
    if name in progress.begun():
        continue
    progress.begin(name)
    if name not in well:
        os.abort()
    progress.end(name)
"""


@pytest.mark.parametrize(
    ("names", "well", "outcomes"),
    [
        ("a,b", "a", ["crashed"]),  # behind the last case is nothing to go on with
        ("a,b,c,d,e,f", "none", ["crashed"] * 3),  # a device that is gone
        ("a,b,c,d,e,f,g", "c,f", ["crashed"] * 5),
    ],
)
def test_processes_are_started_while_cases_are_left_and_some_get_through(
    names: str, well: str, outcomes: list[str], recorder: Recorder, tmp_path: Path
) -> None:
    progress = tmp_path / "progress.jsonl"
    process = Process("p", (sys.executable, "-c", PLANS, str(progress), names, well), progress=progress)
    lines = run_parts([Part("p", PATIENCE_S, (process,))], recorder, io.StringIO())
    assert [line["outcome"] for line in lines] == outcomes


def test_every_part_hands_its_progress_on(tmp_path: Path) -> None:
    parts = parts_of(tmp_path / "run.json", FAMILIES, cores=16)
    processes = [p for part in parts for p in part.processes if "benchmarks.gpu.parts" in p.command]
    assert all(p.command[p.command.index("--progress") + 1] == str(p.progress) for p in processes)
    assert len({p.progress for p in processes}) == len(processes)


def test_the_summary_has_families_one_after_the_other(recorder: Recorder) -> None:
    """They are timed in turn."""
    for case in ("b/1", "a/1", "b/2", "a/2"):
        recorder.write("timing", family=case[0], case=f"kernel/{case}", mode="fwd", provider="bert_fast", us=1.0,
                       share_of_copy_ceiling=None)  # fmt: skip
    assert re.findall(r"^([ab]/\d)", summary(recorder, [], []), re.MULTILINE) == ["a/1", "a/2", "b/1", "b/2"]


def test_the_summary_of_a_run_that_was_cut_off(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    """What is red comes last, and in so few characters that the end of a log holds it."""
    for number in range(400):
        recorder.write("verify", case=f"kernel/{number}", ok=number % 2 == 0, error="wrong " * 40)
    assert summary_main([str(recorder.path)]) == 1
    end = capsys.readouterr().out[-12000:]
    assert "verify: 200 green, 200 red" in end and "red: kernel/1: wrong" in end
    assert re.search(r"red: 200, \d+ of them not shown\n$", end)
    with pytest.raises(SystemExit):
        summary_main([str(recorder.path) + "x"])


def test_caches_of_compilers_lie_below_the_project_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    environment = process_environment()
    assert Path(environment["TRITON_CACHE_DIR"]).is_relative_to(ROOT / "build")
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    assert "TRITON_INTERPRET" not in environment


@pytest.mark.parametrize("target", ["gpu", "gpu-smoke", "gpu-sanitize"])
def test_the_folder_of_results_may_be_an_environment_variable(target: str) -> None:
    command = ["make", "-n", target]
    said = subprocess.run(command, cwd=ROOT, env=os.environ | {"RESULTS_DIR": "else/where"}, capture_output=True,
                          text=True, check=True).stdout  # fmt: skip
    assert "--results else/where" in said
    named = subprocess.run([*command, "RESULTS_DIR=there"], cwd=ROOT, env=os.environ | {"RESULTS_DIR": "else/where"},
                           capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert "--results there" in named


def test_every_file_with_gpu_tests_is_run() -> None:
    assert "tests/kernels/test_dropout_add_layer_norm_gpu.py" in gpu.gpu_test_files()


@pytest.mark.slow
def test_the_real_parts_from_end_to_end_on_a_cpu(
    cpu_run: CpuRun,
) -> None:
    """All but those that have a test of their own beside it, of which only the command line is left to run here."""
    tested_apart = {
        "tests", "finetune", "profile", "steps", "compiled", "compiled_finetune", "embedding", "gemm", "specialized",
    }  # fmt: skip
    # What works must not be killed, however busy the machine is.
    parts = [
        dataclasses.replace(part, budget_s=10 * part.budget_s)
        for part in parts_of(cpu_run.file, [FAMILY], 2) if part.name not in tested_apart
    ]  # fmt: skip
    parts[0] = dataclasses.replace(parts[0], processes=parts[0].processes[:-1])  # without the extension
    recorder = Recorder(cpu_run.results, {"run": "this", "gpu": None})
    lines = run_parts(parts, recorder, io.StringIO())
    outcomes = {line["process"].split()[0]: line["outcome"] for line in lines}
    # Wrong cases make `verify` fail.
    assert outcomes == {
        "verify": "failed", "ceilings": "ok", "compile": "ok", "prepare": "ok", "time": "ok", "peers": "ok",
        "runs": "ok",
    }  # fmt: skip
    text = summary(recorder, lines, [])
    assert "verify: 4 red, 3 green; 0 kernels launched" in text
    assert "red: kernel/tests.benchmarks.fake_family/8x16/fp32/wrong: wrong: worst error 1.0, allowed 0.1" in text
    assert any("/right" in line and "fwd" in line and "compiled" in line for line in text.splitlines())
    assert "owed: nothing" in text and text.endswith("red: 5, 0 of them not shown")


@pytest.mark.parametrize(("status", "is_green"), [(0, True), (1, True), (0, False)])
def test_the_command_names_files_after_the_gpu_and_says_what_failed(
    status: int, is_green: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"run": "made up", "gpu": "Made up 3000 (test)"}

    def parts(run_file: Path, families: list[str], cores: int) -> list[Part]:
        code = (
            "from pathlib import Path; from benchmarks.gpu.run import Run\n"
            f"run = Run.read(Path({str(run_file)!r}))\n"
            "assert run.families == ['x']\n"
            f"run.recorder.write('verify', case='c', ok={is_green}, error='wrong', family='x')"
        )
        return [Part("a", 90.0, (python("a", code),)), Part("b", 90.0, (python("b", f"raise SystemExit({status})"),))]

    monkeypatch.setattr(gpu, "probe", lambda device, commit: environment | {"commit": commit})
    monkeypatch.setattr(gpu, "family_names", lambda: ["x", "y"])
    monkeypatch.setattr(gpu, "parts_of", parts)
    monkeypatch.setattr(gpu.status, "RESULTS", tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        done = gpu.main(["--results", str(tmp_path / "new"), "--commit", "c0ffee", "--minutes", "4.5",
                         "--families", "x"])  # fmt: skip
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert done == (0 if status == 0 and is_green else 1)
    lines = list(read_lines(tmp_path / "new" / "made-up-3000--test-.jsonl"))
    assert [line["kind"] for line in lines] == ["verify", "part", "part"]
    assert {line["commit"] for line in lines} == {"c0ffee"}
    assert lines[1]["allowed_s"] <= 135, "budgets are scaled to the minutes given"
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "new" / "made-up-3000--test-.log").read_text()
    assert ("red: c: wrong" in shown) == (not is_green)
    assert "_dropout_add_layer_norm_fwd_kernel" in shown, "what is still owed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("options", [(), ("--parts", "smoke")], ids=["all", "smoke"])
def test_without_a_device_nothing_is_run(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--results", str(tmp_path / "results"), *options]) == 1
    said = capsys.readouterr().out
    assert said.startswith("no CUDA or ROCm device") and said.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_the_documentation_has_the_parts_and_budgets(tmp_path: Path) -> None:
    parts = parts_of(tmp_path / "run.json", FAMILIES, cores=16)
    rows = re.findall(r"^\| (\w+) \| (\d+) \|", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    assert [(name, int(seconds)) for name, seconds in rows] == [(part.name, part.budget_s) for part in parts]
