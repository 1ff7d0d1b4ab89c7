"""`--ptxas`: kernels by another assembler than Triton's own, and what is none."""

import os
import re
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.driver import Part, Process
from benchmarks.kit import programs
from benchmarks.kit.assembler import VARIABLES, use_assembler
from benchmarks.kit.results import read_lines
from bert_fast.devices import assembler
from tests.benchmarks.test_smoke_cases import over_null_driver

pytest.importorskip("triton")


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has them: none; whatever a test sets is gone after it."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.slow
def test_smoke_over_the_null_driver_by_another(tmp_path: Path) -> None:
    """One that takes down what it is called with: it makes the kernel, which fits and launches.

    With a cache of its own, so that the kernel is compiled.
    """
    own = (assembler((9, 0)) or "").split(" at ")[1]
    calls = tmp_path / "calls"
    other = script(tmp_path / "ptxas", f"echo \"$@\" >> '{calls}'\n'{own}' \"$@\" && echo another >> /dev/stderr")
    said = over_null_driver(
        "benchmarks.gpu", "--parts", "smoke", "--device", "sm_90", "--families", "dropout", "--results", str(tmp_path),
        "--minutes", "10", "--ptxas", str(other), TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert said.splitlines()[-2:] == ["smoke: 1 green; 1 kernels launched", "nothing is red"]
    assert re.search(r"^_dropout_kernel +1 +\d", said, re.MULTILINE), "what was compiled, in a table"
    assert "--gpu-name=sm_90a" in calls.read_text()
    line, _ = read_lines(tmp_path / "no-gpu-sm-90.jsonl")
    assert line["ptxas"].endswith(f" at {other}") and line["capability"] == "9.0" and f"ptxas {line['ptxas']}" in said
    assert line["outputs"] == [] and "times" not in line and line["gpu"] is None
    assert line["kernels"] == {"_dropout_kernel": programs.digest("dropout", "_dropout_kernel")}
    (compiled,) = line["compiled"]
    assert compiled["kernel"] == "_dropout_kernel" and compiled["compile_s"] > 0 and compiled["registers"] > 16
    assert compiled["spill_bytes"] == 0 and compiled["shared_bytes"] == 0 and compiled["warps"] >= 1


def test_both_variables_name_it(tmp_path: Path) -> None:
    other = script(tmp_path / "ptxas", "echo 'Cuda compilation tools, release 13.4, V13.4.1'")
    assert use_assembler(Path(os.path.relpath(other))) == f"13.4 at {other}"
    assert {os.environ[name] for name in VARIABLES} == {str(other)}


@pytest.mark.parametrize("text", [None, "exit 1", "echo GNU assembler 2.40"], ids=["missing", "fails", "another tool"])
def test_what_is_no_assembler_is_named(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "ptxas" if text is None else script(tmp_path / "ptxas", text)
    with pytest.raises(SystemExit, match=f"^--ptxas: expected a ptxas.*, got {path}"):
        use_assembler(path)
    assert not set(VARIABLES) & set(os.environ)


def test_only_what_compares_runs_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = script(tmp_path / "ptxas", "echo 'release 13.4'")
    seen = tmp_path / "seen"

    def parts(*_: object) -> list[Part]:
        code = f"import os; print(os.environ['{VARIABLES[0]}'], file=open({str(seen)!r}, 'a'))"
        return [
            Part(name, 60.0, (Process(name, (sys.executable, "-c", code)),)) for name in ("verify", "tests", "time")
        ]

    monkeypatch.setattr(gpu, "probe", lambda device, commit: {"run": "r", "gpu": "g"})
    monkeypatch.setattr(gpu, "parts_of", parts)
    command = ["--results", str(tmp_path), "--ptxas", str(other)]
    with pytest.raises(SystemExit, match="--parts with --ptxas: expected some of verify,tests, got time"):
        gpu.main([*command, "--parts", "verify,time"])
    assert gpu.main(command) == 0
    lines = list(read_lines(tmp_path / "g.jsonl"))
    assert [line["part"] for line in lines] == ["verify", "tests"]
    assert {line["ptxas"] for line in lines} == {f"13.4 at {other}"}
    assert seen.read_text().split() == [str(other)] * 2
