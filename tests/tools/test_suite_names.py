"""Names of tests: what differs between two processes is found, and what nobody can read or type."""

import gzip
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tools import suite_names

# What makes a name: imports, and a value.
UNSTABLE = {
    "clock": ("import time", "int(time.time()) // 10_000"),
    "packed": ("import gzip", "gzip.compress(b'a')"),
    "hash": ("", "hash('a') % 10**6"),
    "day": ("import datetime", "datetime.datetime.now().day"),
    "folder": ("from pathlib import Path", "Path(__file__).parents[1].name"),
    "home": ("from pathlib import Path", "Path.home().name"),
    "temporary": ("import tempfile", "tempfile.gettempdir().replace('/', '')"),
    "address": ("", "id(object())"),
}
STABLE = """
@pytest.mark.parametrize("value", ["a", "b c", 1.5, None])
def test_stable(value): pass
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one file of tests, without the hook that names this project's parameters."""
    for name in ("benchmarks", "bert_fast", "tests", "tools"):
        (tmp_path / "project" / name).mkdir(parents=True)
    path = tmp_path / "project"
    (path / "pyproject.toml").write_text("")
    (path / "tests" / "test_x.py").write_text(f"import pytest\n{STABLE}")
    shutil.copy(suite_names.ROOT / "tools" / "other_clock.py", path / "tools")
    monkeypatch.setattr(suite_names, "ROOT", path)
    monkeypatch.setattr(suite_names, "FOUND", path / "found")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take half of the time
    return path


def test_stable_names_are_right(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite_names.main([]) == 0
    assert capsys.readouterr().out == "4 names, 0 problems\n"


def test_what_another_process_calls_otherwise_is_found(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite_names, "SHOWN", 100)
    with (project / "tests" / "test_x.py").open("a") as file:
        for cause, (imports, value) in UNSTABLE.items():
            file.write(f"{imports}\n@pytest.mark.parametrize('value', [{value}])\ndef test_{cause}(value): pass\n")
    assert suite_names.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    for process in ("the first process", "the second"):
        told = {line.partition("::test_")[2].partition("[")[0] for line in lines if f": only {process} of two" in line}
        assert told == UNSTABLE.keys()


def test_a_run_of_all_tests_is_compared(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert suite_names.main(["elsewhere"]) == 0
    assert capsys.readouterr().out == "4 names\n"
    with pytest.raises(FileNotFoundError):  # nothing was run
        suite_names.main(["compare"])
    names = suite_names.collect(project, {})
    for found, problems in ((names, 0), (names[1:], 1), ([*names, "tests/test_x.py::test_other"], 1)):
        for worker, items in (("gw0", found), ("gw1", [])):
            monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
            suite_names.pytest_collection_modifyitems([SimpleNamespace(nodeid=name) for name in items])
        capsys.readouterr()
        assert suite_names.main(["compare"]) == bool(problems)
        assert capsys.readouterr().out.endswith(f"{len(found)} names, {problems} problems\n")


def test_another_order_is_found() -> None:
    assert suite_names.differences(["a", "b"], ["b", "a"]) == [
        "the two processes found the same names in another order"
    ]
    assert suite_names.differences(["a", "b"], ["b"]) == ["a: only the first process of two found it (1 such names)"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        pytest.param(r"\x1f\x8b", "an escape", id="bytes"),
        pytest.param("<object at 0x7f12>", "an address", id="address"),
        pytest.param("a-/tmp/x", "a path", id="path"),
        pytest.param("d41d8cd98f00b204e9800998ecf8427e", "a row of digits", id="digest"),
        pytest.param("word " * 30, "too long", id="long"),
        pytest.param("\t", "not printable", id="tab"),
    ],
)
def test_names_that_nobody_can_read(value: str, why: str) -> None:
    (found,) = suite_names.unreadable(f"tests/test_x.py::test_a[{value}]")
    assert found.startswith(why)


@pytest.mark.parametrize("value", ["bert/encoder/layer_0", "4611686018427387904-300", "{'a': 1}", "0xff", "a/b-1/2"])
def test_names_that_are_right(value: str) -> None:
    assert suite_names.unreadable(f"tests/test_x.py::test_a[{value}]") == []


def test_tests_that_cannot_be_collected_are_shown(project: Path) -> None:
    (project / "tests" / "test_x.py").write_text("import no_such_module\n")
    with pytest.raises(SystemExit, match="no_such_module"):
        suite_names.main([])


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (gzip.compress(b"a"), "argument"),
        ("é", "argument"),
        ("a\n", "argument"),
        (lambda: 0, "argument"),
        (torch.float16, "float16"),
        ((2, 3), "2x3"),
        (r"\[a\]", "[a]"),
        ("word " * 30, "word " * 6 + "word"),
        ("w" * 200, "w" * 36),
        ("", ""),
        (0.5, None),  # pytest's own
        ((True, 2), None),
        ((1,) * 20, None),
    ],
)
def test_parameters_of_this_project_get_names(value: object, name: str | None, request: pytest.FixtureRequest) -> None:
    make = request.config.hook.pytest_make_parametrize_id
    assert make(config=request.config, val=value, argname="argument") == name
