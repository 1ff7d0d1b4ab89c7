"""`make kernels`: what is due, for which families, and that a step that fails ends it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit import programs
from tools import check, kernels
from tools.null_driver import rehearsal
from tools.witness import record as witness

FILES = {
    "_rows": "X = 1\n", "_launch": "from bert_fast.triton import _rows\n",
    "norm": "from bert_fast.triton._launch import launch\n", "mean": "import math\n",
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with four files of kernels and a record of them."""
    folder, record = tmp_path / "bert_fast" / "triton", tmp_path / "tests" / "rehearsal.json"
    for path, text in ((folder / f"{name}.py", text) for name, text in FILES.items()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    record.parent.mkdir()
    record.write_text("{}")
    for module in (kernels, programs):
        monkeypatch.setattr(module, "KERNELS", folder)
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    monkeypatch.setattr(rehearsal, "RECORD", record)
    return tmp_path


def commit(project: Path) -> None:
    named = ["-c", "user.name=x", "-c", "user.email=x@y"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(["git", *named, *words], cwd=project, check=True)


def test_changed_files_are_those_since_the_record(project: Path) -> None:
    assert kernels.changed_files() is None, "no repository"
    commit(project)
    assert kernels.changed_files() == []
    (project / "bert_fast" / "triton" / "_rows.py").write_text("X = 2\n")
    assert kernels.changed_files() == ["_rows"], "not committed yet"
    commit(project)
    assert kernels.changed_files() == ["_rows"], "the record was not written since"


@pytest.mark.parametrize(("changed", "families"), [("_rows", ["norm"]), ("norm", ["norm"]), ("mean", ["mean"])])
def test_families_that_need_a_file(changed: str, families: list[str], project: Path) -> None:
    assert kernels.families_of([changed]) == families


def test_tests_of_families_are_there() -> None:
    found = kernels.interpreter_tests(["layer_norm", "optimizer"])
    assert {"tests/kernels/test_layer_norm.py", "tests/ops/test_layer_norm.py", "tests/optim"} <= {*found}
    assert all((kernels.ROOT / path).exists() and "dropout" not in path for path in found)


def test_what_is_due_is_of_kernels_that_differ_from_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not kernels.is_due(), "run make kernels"
    runs: dict[str, Any] = witness.read()
    monkeypatch.setattr(kernels, "kernel_digests", lambda: runs["sm_90"]["kernels"] | {"_dropout_kernel": "another"})
    assert kernels.is_due()
    monkeypatch.undo()
    monkeypatch.setattr(rehearsal, "sources", lambda chip: "another")
    assert kernels.is_due()


@pytest.mark.parametrize("failing", ["interpreter", "gate, oldest", ""])
def test_a_step_that_fails_is_the_last(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def step(commands: dict[str, list[str]], environment: dict[str, str]) -> list[check.Outcome]:
        [(name, command)] = commands.items()
        ran.append(name)
        assert ("oldest" in name) == (environment.get("PYTHONPATH") == ".compat")
        assert name != "interpreter" or "tests/ops/test_dropout.py" in command
        return [check.Outcome(name, int(name == failing), 0.0, "")]

    monkeypatch.setattr(check, "run_until_failure", step)
    monkeypatch.setattr(kernels, "is_due", lambda: True)
    monkeypatch.setattr(kernels, "changed_files", lambda: ["dropout"])
    assert kernels.main([]) == int(bool(failing))
    assert ran[-1] == failing if failing else ran == [
        "interpreter", "gate", "gate, oldest", "rehearsal", "witness", "witness, sm_80", "witness, oldest", "owed",
    ]  # fmt: skip


def test_no_family_has_no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a record alone is old, the interpreter has nothing to do: without a name pytest would take all tests."""
    ran: list[str] = []
    monkeypatch.setattr(
        check, "run_until_failure", lambda commands, _: ran.extend(commands) or [check.Outcome("", 0, 0.0, "")]
    )
    kernels.run([])
    assert ran[0] == "gate" and len(ran) == 7


def test_nothing_runs_where_nothing_is_due(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels, "is_due", lambda: False)
    monkeypatch.setattr(kernels, "run", lambda families: pytest.fail("nothing is due"))
    assert kernels.main([]) == 0 and capsys.readouterr().out.startswith("nothing is due")
