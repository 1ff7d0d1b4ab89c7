"""`make kernels` and the record that it writes: what is due, for which families, and that a step that fails ends it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.families import family_names
from tools import check, kernel_record, kernels

STEPS = ["interpreter", "gate", "gate, oldest", "rehearsal", "witness", "witness, sm_80", "witness, oldest", "owed"]
NOTHING: dict[str, list[str]] = {section: [] for section in kernel_record.COLUMNS}


def test_the_record_is_small_and_a_line_a_row() -> None:
    text = kernel_record.PATH.read_text(encoding="utf-8")
    record = kernel_record.read()
    assert len(text) < 80_000 and kernel_record._to_json(record) == text
    assert text.count('": [') == sum(len(record[section]) for section in kernel_record.COLUMNS)
    assert max(map(len, text.splitlines())) <= 120


def test_an_update_leaves_what_it_does_not_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_record, "PATH", tmp_path / "kernels.json")
    row = dict.fromkeys(kernel_record.COLUMNS["witnessed"], 1)
    empty = {"triton": {"newest": "3.9.0", "oldest": "3.6.0"}, "compiled": {}, "rehearsed": {}}
    kernel_record.PATH.write_text(json.dumps(empty | {"witnessed": {"a sm_90": [1, 1, 1, "x"]}}))
    kernel_record.update("witnessed", {"b sm_90": row})
    assert [*kernel_record.read()["witnessed"]] == ["a sm_90", "b sm_90"]
    assert kernel_record.stale("witnessed", {"a sm_90": "x", "b sm_90": "2", "c sm_90": "3"}) == ["b sm_90", "c sm_90"]
    kernel_record.update("witnessed", {}, ["b sm_90"], {"newest": "4.0.0"})
    found = kernel_record.read()
    assert [*found["witnessed"]] == ["b sm_90"] and found["triton"] == {"newest": "4.0.0", "oldest": "3.6.0"}


def test_nothing_is_due() -> None:
    pytest.importorskip("triton")
    assert kernels.due() == NOTHING, "run make kernels"


@pytest.mark.parametrize(
    ("section", "key", "needed", "others"),
    [
        ("compiled", "layer_norm_fwd sm_80", {"layer_norm"}, {"dropout", "optimizer"}),
        ("compiled", "dropout sm_90 oldest", {"dropout"}, {"layer_norm"}),
        ("rehearsed", "mlp sm_86", {"mlp"}, {"layer_norm"}),
        ("witnessed", "lamb_ratio sm_90", {"optimizer"}, {"layer_norm"}),
    ],
)
def test_families_of_what_is_due(section: str, key: str, needed: set[str], others: set[str]) -> None:
    found = {*kernels.families_that_differ(NOTHING | {section: [key]})}
    assert needed <= found <= {*family_names()} - others


def test_tests_of_families_are_there() -> None:
    found = kernels.interpreter_tests(["layer_norm", "optimizer"])
    assert {"tests/kernels/test_layer_norm.py", "tests/ops/test_layer_norm.py", "tests/optim"} <= {*found}
    assert all((kernels.ROOT / path).exists() and "dropout" not in path for path in found)


@pytest.mark.parametrize("failing", ["interpreter", "gate, oldest", ""])
def test_a_step_that_fails_is_the_last(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def step(commands: dict[str, list[str]], environment: dict[str, str]) -> list[check.Outcome]:
        [(name, command)] = commands.items()
        ran.append(name)
        assert ("oldest" in name) == (environment.get("PYTHONPATH") == ".compat")
        assert name != "interpreter" or "tests/ops/test_dropout.py" in command
        assert "--all" not in command
        return [check.Outcome(name, int(name == failing), 0.0, "")]

    monkeypatch.setattr(check, "run_until_failure", step)
    monkeypatch.setattr(kernels, "due", lambda: NOTHING | {"rehearsed": ["dropout sm_80"]})
    assert kernels.main([]) == int(bool(failing))
    assert ran == (STEPS[: STEPS.index(failing) + 1] if failing else STEPS)


def test_all_of_it_is_made_again_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: dict[str, list[str]] = {}
    monkeypatch.setattr(
        check, "run_until_failure", lambda steps, _: commands.update(steps) or [check.Outcome("", 0, 0.0, "")]
    )
    monkeypatch.setattr(kernels, "due", lambda: NOTHING)
    assert kernels.main(["--all"]) == 0
    assert [*commands] == STEPS
    assert all(("--all" in commands[name]) == (name not in ("interpreter", "owed")) for name in STEPS)
    assert "tests/ops/test_layer_norm.py" in commands["interpreter"]


def test_nothing_runs_where_nothing_is_due(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels, "due", lambda: NOTHING)
    monkeypatch.setattr(kernels, "run", lambda *_, **__: pytest.fail("nothing is due"))
    assert kernels.main([]) == 0 and capsys.readouterr().out.startswith("nothing is due")


def test_no_family_has_no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name pytest would take all tests of the interpreter."""
    ran: list[Any] = []
    monkeypatch.setattr(
        check, "run_until_failure", lambda commands, _: ran.extend(commands) or [check.Outcome("", 0, 0.0, "")]
    )
    kernels.run([])
    assert ran == STEPS[1:]
