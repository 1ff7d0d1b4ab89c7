"""The check runner: one failure fails the run, the others still run, and the last line says which failed."""

import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tools import check
from tools.sanitized import python as sanitized

SANITIZED = check.ROOT / "tools" / "sanitized"


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


def test_no_more_commands_run_at_once_than_there_are_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several checks together: each command counts those that are in the folder with it."""
    monkeypatch.setattr(check, "CORES", threading.Semaphore(2))
    monkeypatch.setattr(check, "ROOT", tmp_path)
    lines = (
        "import os, sys, time", "open(sys.argv[1], 'w').close()", "time.sleep(0.2)", "print(len(os.listdir('.')))",
        "os.remove(sys.argv[1])",
    )  # fmt: skip
    code = "; ".join(lines)

    def made_up(name: str) -> list[check.Outcome]:
        return [check._run(name, [sys.executable, "-c", code, f"{name} {k}"], whole=True) for k in range(3)]

    checks = {name: (lambda name=name: made_up(name)) for name in check.AT_ONCE}
    monkeypatch.setattr(check, "CHECKS", checks)
    monkeypatch.setattr(sys, "argv", ["check.py"])
    seen: list[str] = []
    run_now = check._run_now

    def kept(*arguments: Any) -> check.Outcome:
        done = run_now(*arguments)
        seen.append(done.last_line)
        return done

    monkeypatch.setattr(check, "_run_now", kept)
    assert check.main() == 0
    assert len(seen) == 9 and set(seen) <= {"1", "2"}


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
    assert [(run.name, run.status) for run in check.run_until_failure(commands)] == [("a", 0), ("b", 3)]


def test_rows_run_side_by_side_and_show_their_output_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of two commands waits for the other's file between its lines; what follows a failure in its row is left."""
    monkeypatch.setattr(check, "JOBS", 2)
    monkeypatch.setattr(check, "CORES", threading.Semaphore(2))
    wait = "i=0; until [ -e {other} ] || [ $i -ge {patience} ]; do sleep 0.1; i=$((i + 1)); done; [ -e {other} ]"

    def meets(own: str, other: str, status: int) -> list[str]:
        code = f"echo {own} begins; touch {own}; {wait.format(other=other, patience=int(10 * PATIENCE_S))} || exit 9"
        return ["sh", "-c", f"cd '{tmp_path}'; {code}; echo {own} ends; exit {status}"]

    runs = check._run_together(
        {"first": meets("a", "b", 3), "left out": ["true"]},
        {"second": meets("b", "a", 0), "third": ["sh", "-c", "echo c"]},
    )
    assert [(run.name, run.status, run.last_line) for run in runs] == [
        ("first", 3, "a ends"), ("second", 0, "b ends"), ("third", 0, "c"),
    ]  # fmt: skip
    shown = capfd.readouterr().out
    assert all(f"{name} begins\n{name} ends\n" in shown for name in "ab")


def test_what_ends_beside_the_tests_is_shown_behind_their_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The tests begin when their texts are written, while the rest of that check goes on; they wait for it here."""
    monkeypatch.setattr(check, "FINISHED", defaultdict(threading.Event))
    written, rest = tmp_path / "written", tmp_path / "rest"
    wait = f"i=0; until [ -e {rest} ] || [ $i -ge {int(10 * PATIENCE_S)} ]; do sleep 0.1; i=$((i + 1)); done"

    def cpp() -> list[check.Outcome]:
        return [
            check._run("texts write", ["sh", "-c", f"sleep 0.3; touch '{written}'"], whole=True),
            check._run("rest", ["sh", "-c", f"echo the rest; touch '{rest}'"], whole=True),
        ]

    def python() -> list[check.Outcome]:
        return [check._run("tests", ["sh", "-c", f"[ -e '{written}' ] || exit 9; {wait}; sleep 0.3; echo they 'end'"])]

    monkeypatch.setattr(check, "CHECKS", {"cpp": cpp, "python": python})
    monkeypatch.setattr(sys, "argv", ["check.py"])
    assert check.main() == 0
    shown = capfd.readouterr().out
    assert 0 < shown.index("they end\n") < shown.index("\nthe rest\n") < shown.index("PASSED (3 of 3 checks")


@pytest.mark.parametrize("jobs", [1, 2])
def test_texts_are_read_where_their_program_was_built(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build or the texts may fail: what needs them is left out, all else runs."""

    def run(fails: str) -> list[str]:
        begun = []

        def made_up(name: str, *_: object, **__: object) -> check.Outcome:
            begun.append(name)
            return check.Outcome(name, int(name == fails), 0.0, "")

        monkeypatch.setattr(check, "_run", made_up)
        outcomes = check.cpp()
        assert [run.name for run in outcomes if run.status] == ([fails] if fails else [])
        assert sorted(begun) == sorted(outcome.name for outcome in outcomes)
        return [outcome.name for outcome in outcomes]

    monkeypatch.setattr(check, "JOBS", jobs)
    built, threads = (
        ["C++ configure", "C++ build", "C++ tests", "C++ counts"],
        ["threads configure", "threads build", "threads tests"],
    )
    written, read = ["texts write"], ["texts address", "texts threads"]
    assert run("") == [*built, *written, *threads, *read]
    assert run("C++ build") == [*built[:2], *written, *threads, read[1]]
    assert run("threads build") == [*built, *written, *threads[:2], read[0]]
    assert run("texts write") == [*built, *written, *threads]
    assert run("C++ tests") == [*built[:3], *written, *threads, *read]


def test_texts_are_written_where_the_tests_look_for_them() -> None:
    source = (check.ROOT / "tests" / "tokenization" / "fuzz_file.py").read_text(encoding="utf-8")
    assert check.FUZZ_FILE.relative_to(check.ROOT).parts == ("build", "fuzz", "wordpiece.bin")
    assert 'FULL_FILE = ROOT / "build" / "fuzz" / "wordpiece.bin"' in source
    source = (check.ROOT / "tests" / "tokenization" / "unigram_fuzz_file.py").read_text(encoding="utf-8")
    assert check.UNIGRAM_FILE.relative_to(check.ROOT).parts == ("build", "fuzz", "unigram.bin")
    assert 'FULL_FILE = fuzz_file.ROOT / "build" / "fuzz" / "unigram.bin"' in source


def test_sanitized_module_is_the_one_that_python_imports() -> None:
    code = "import sys; print(sys.meta_path[0].find_spec('bert_fast._native').origin)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SANITIZED)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(check.MODULE_DIR / "_native."))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A g++ that answers where libraries are, first on PATH."""
    path = tmp_path / "g++"
    path.write_text("#!/bin/sh\necho /lib/${1#-print-file-name=}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return path


def test_sanitizers_come_before_all_other_libraries(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    environment = sanitized.environment()
    assert environment["LD_PRELOAD"].split() == ["/lib/libasan.so", "/lib/libubsan.so", "/lib/libstdc++.so"]
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(SANITIZED), "/mine"]


def test_compiler_without_sanitizers_is_named(compiler: Path) -> None:
    compiler.write_text("#!/bin/sh\necho ${1#-print-file-name=}\n")
    with pytest.raises(SystemExit, match=r"libasan\.so: g\+\+ has none"):
        sanitized.environment()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checks that were run, all of them made up; "together" before those that share the collected tests."""
    names: list[str] = []
    for table, kind in (("CHECKS", ""), ("TOGETHER", "together ")):
        made_up = {name: lambda told=kind + name: names.append(told) or [] for name in getattr(check, table)}
        monkeypatch.setattr(check, table, made_up)
    return names


def test_what_takes_long_or_needs_more_is_not_run_by_default(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["check.py"])
    assert check.main() == 0
    assert sorted(ran[:3]) == ["cpp", "lint", "together names"] and ran[3:] == ["together python", "interpreter"]


@pytest.mark.parametrize("name", ["names", "python"])
def test_names_alone_are_collected_twice(name: str, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["check.py", name, "lint"])
    assert check.main() == 0
    assert sorted(ran) == sorted([name, "lint"])
