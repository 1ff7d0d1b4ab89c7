"""The check runner: one failure fails the run, the others still run, and the last line says which failed."""

import sys
from collections.abc import Callable

import pytest

from tools import check


def outcome(code: str) -> Callable[[], list[check.Outcome]]:
    return lambda: [check._run(code, [sys.executable, "-c", code])]


@pytest.mark.parametrize(
    ("codes", "status", "last_line"),
    [
        (["print(1)", "print(2)"], 0, "PASSED (2 of 2 checks"),
        (["raise SystemExit(3)", "print(2)"], 1, "FAILED: raise SystemExit(3) (1 of 2 checks"),
        (["print(1)", "import os; os.abort()"], 1, "FAILED: import os; os.abort() (1 of 2 checks"),
    ],
)
def test_summary_and_status(
    codes: list[str],
    status: int,
    last_line: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "CHECKS", {code: outcome(code) for code in codes})
    monkeypatch.setattr(sys, "argv", ["check.py"])
    assert check.main() == status
    assert capfd.readouterr().out.splitlines()[-1].startswith(last_line)


def test_a_setting_of_the_shell_does_not_reach_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_FAST_BACKEND", "triton")
    code = "import os; print(os.environ.get('BERT_FAST_BACKEND'), os.environ.get('TRITON_INTERPRET'))"
    run = check._run("environment", [sys.executable, "-c", code], {"TRITON_INTERPRET": "1"})
    assert run.last_line == "None 1"


def test_unknown_check_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["check.py", "lnit"])
    with pytest.raises(SystemExit):
        check.main()
    assert "no check lnit" in capsys.readouterr().err


def test_the_rest_of_a_row_waits_for_what_it_needs() -> None:
    commands = {name: [sys.executable, "-c", code] for name, code in (("a", ""), ("b", "exit(3)"), ("c", ""))}
    assert [(run.name, run.status) for run in check._run_until_failure(commands)] == [("a", 0), ("b", 3)]


def test_texts_are_written_where_the_tests_look_for_them() -> None:
    source = (check.ROOT / "tests" / "tokenization" / "fuzz_file.py").read_text(encoding="utf-8")
    assert check.FUZZ_FILE.relative_to(check.ROOT).parts == ("build", "fuzz", "wordpiece.bin")
    assert 'FULL_FILE = ROOT / "build" / "fuzz" / "wordpiece.bin"' in source
