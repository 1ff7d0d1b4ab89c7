"""Numbers of tests: fewer than on record fail with the folder named, and are recorded with a reason or not at all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import check, suite_counts

CI = {"system": "Linux x86_64", "gpu": False}
TESTS = """
import pytest
@pytest.mark.parametrize("number", [1.5, 2.5, 3.5])
def test_runs(number): pass
def test_skips(): pytest.skip("no processor")
def test_memory(): pytest.skip("less than 8 GiB of memory is free")
@pytest.mark.xfail
def test_fails(): assert False
"""


def case(name: str, inside: str = "", folder: str = "tests.ops.test_mlp") -> str:
    return f'<testcase classname="{folder}" name="{name}">{inside}</testcase>'


def skip(message: str, type: str = "pytest.skip") -> str:
    return f'<skipped type="{type}" message="{message}"/>'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(suite_counts, "REPORTS", tmp_path)
    monkeypatch.setattr(suite_counts, "RECORD", tmp_path / "counts.json")
    monkeypatch.setattr(suite_counts, "environment", lambda: CI)
    return tmp_path


def report(folder: Path, *cases: str, name: str = "python") -> None:
    (folder / f"{name}.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")


def record(folder: Path, *cases: str, reason: str | None = None) -> dict[str, dict[str, dict[str, int]]]:
    report(folder, *cases)
    assert suite_counts.record_reports(reason) == 0
    stored: dict[str, dict[str, dict[str, int]]] = json.loads((folder / "counts.json").read_text())
    return stored


def test_what_counts(folder: Path) -> None:
    skipped = [skip("no GPU"), skip("less than 8 GiB of memory is free"), skip("wrong", "pytest.xfail")]
    report(
        folder, case("test_a[1.5]"), case("test_a[1.5]", "<error/>"), case("test_b", "<failure/>"),
        *(case(f"test_{number}", inside) for number, inside in enumerate(skipped)),
        case("test_c", folder="tests.test_graphs"), case("test_d", folder="tests.training.reporting.test_page.TestX"),
        case("tests.cli.test_main", skip("collection skipped"), folder=""), case("wordpiece", folder="wordpiece"),
    )  # fmt: skip
    one = suite_counts.Folder(1, 1)
    assert suite_counts.read_report(folder / "python.xml") == {
        "tests/ops": suite_counts.Folder(5, 4), "tests": one, "tests/training": one, "csrc/tests": one,
        "tests/cli": suite_counts.Folder(whole=False),
    }  # fmt: skip


def test_the_reports_of_pytest_are_understood(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two processes write them."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (folder / "tests" / "ops").mkdir(parents=True)
    (folder / "tests" / "ops" / "test_x.py").write_text(TESTS)
    (folder / "tests" / "test_y.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "xdist", "--rootdir", str(folder), "tests"]
    subprocess.run([*command, f"--junitxml={folder}/python.xml"], cwd=folder, capture_output=True, check=True)
    found = suite_counts.read_report(folder / "python.xml")
    assert found == {"tests/ops": suite_counts.Folder(6, 5), "tests": suite_counts.Folder(whole=False)}


def test_fewer_tests_fail_with_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(folder, case("test_a"), case("test_b"))
    report(folder, case("test_a"), case("test_b", skip("no GPU")))
    assert suite_counts.compare("python") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tests/ops: 1 fewer ran than on record"
    assert "record --reason" in lines[1] and lines[2] == "1 ran, 1 missing"
    report(folder)
    assert suite_counts.compare("python") == 1
    assert capsys.readouterr().out.startswith("tests/ops: 2 fewer ran")


def test_more_tests_in_one_folder_do_not_hide_fewer_in_another(folder: Path) -> None:
    record(folder, case("test_a"), case("test_a", folder="tests.cli.test_main"))
    report(folder, case("test_a"), case("test_b"), case("test_c"))
    assert suite_counts.compare("python") == 1


def test_more_tests_are_fine_and_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(folder, case("test_a"))
    report(folder, case("test_a"), case("test_b"))
    assert suite_counts.compare("python") == 0
    assert capsys.readouterr().out == "tests/ops: 1 more ran than on record\n2 ran, 0 missing\n"


def test_elsewhere_tests_may_skip_but_not_vanish(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(folder, case("test_a"), case("test_b"), case("test_a", folder="tests.cli.test_main"))
    monkeypatch.setattr(suite_counts, "environment", lambda: CI | {"gpu": True})
    missing_package = case("tests.cli.test_main", skip("collection skipped"), folder="")
    report(folder, case("test_a"), case("test_b", skip("no GPU")), missing_package)
    assert suite_counts.compare("python") == 0
    assert capsys.readouterr().out.startswith("not the environment of the record (gpu True, not False)")
    report(folder, case("test_a"), missing_package)
    assert suite_counts.compare("python") == 1


def test_fewer_tests_are_recorded_with_a_reason_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = record(folder, case("test_a"), case("test_b"), case("test_c"))
    report(folder, case("test_a"))
    assert suite_counts.record_reports(None) == 1
    assert capsys.readouterr().out == "python: tests/ops has 2 fewer than on record: say why, --reason\n"
    assert json.loads((folder / "counts.json").read_text()) == before
    after = record(folder, case("test_a"), reason="one test for three")
    entry = {"check": "python", "folder": "tests/ops", "tests": 2, "reason": "one test for three"}
    assert after == before | {"fewer": [entry]}
    assert suite_counts.compare("python") == 0
    report(folder)
    assert suite_counts.compare("python") == 1


def test_a_reason_goes_when_there_are_as_many_tests_again(folder: Path) -> None:
    record(folder, case("test_a"), case("test_b"))
    record(folder, case("test_a"), reason="one for two")
    after = record(folder, *(case(f"test_{number}") for number in range(3)))
    assert after["fewer"] == [] and after["python"] == {"tests/ops": {"collected": 3, "ran": 3}}


def test_only_the_environment_of_the_record_can_be_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(folder, case("test_a"))
    monkeypatch.setattr(suite_counts, "environment", lambda: CI | {"gpu": True})
    assert suite_counts.record_reports("why not") == 1


def test_reports_are_written_where_they_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert check.REPORT_DIR == suite_counts.REPORTS
