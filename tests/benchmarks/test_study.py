"""The command of a study: stores what jobs yield, tells of failures, shows tables; processes of their own."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kit.results import NO_DATA
from benchmarks.kit.study import Job, Line, Study, in_a_process, one_line
from benchmarks.recipes.data import prepare

LINE = {"kind": "toy", "case": "a", "fill": 0.5, "entrants": {"ours": {"ms": 5.0, "who": "x"}, "theirs": {"ms": 7.25}}}


def _jobs(options: Namespace) -> dict[str, Job]:
    def fails() -> Iterator[Line]:
        raise RuntimeError("ids differ")
        yield

    return {"toy/a": lambda: [LINE | {"rounds": options.rounds}], "toy/b": fails, "toy/c": lambda: [LINE]}


def _study(file: Path, page: Path | None = None) -> Study:
    return Study(
        "toy", "Help.", file, _jobs, tables=lambda path: {"all": str(path.exists())}, page=page, rounds=3,
        environment=lambda: {"processor": "Made up"},
    )  # fmt: skip


def test_lines_of_jobs_are_stored_and_failures_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = _study(tmp_path / "toy.jsonl")
    assert study.main(["--only", "/a", "--dry-run"]) == 0 and not study.file.exists()
    assert study.main(["--only", "/b"]) == 1 and study.main([]) == 1, "one that fails stops no other"
    first, second = map(json.loads, study.file.read_text().splitlines())
    assert first == {"processor": "Made up", "time": first["time"], "rounds": 3, **LINE} and "rounds" not in second
    said = capsys.readouterr().out
    assert "a: fill 0.5, rounds 3; ours ms 5; theirs ms 7.25  [" in said and "toy/b: FAILED: ids differ" in said
    assert study.main(["--list", "--only", "toy"]) == 0 and capsys.readouterr().out.split() == list(_jobs(Namespace()))


def test_missing_data_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.kit.study.DATA", tmp_path / "data")
    monkeypatch.setattr("benchmarks.recipes.data.DATA", tmp_path / "data")

    def in_a_child() -> Iterator[Line]:
        raise RuntimeError("Traceback (most recent call last):\nFileNotFoundError: x.json")
        yield

    def at_once(options: Namespace) -> dict[str, Job]:
        prepare(tmp_path / "prepared")
        return {}

    study = Study("toy", "Help.", tmp_path / "toy.jsonl", lambda _: {"a": in_a_child}, environment=dict)
    assert study.main([]) == 1
    assert capsys.readouterr().out == f"a: FAILED: FileNotFoundError: x.json ({NO_DATA})\n"
    assert Study("toy", "Help.", tmp_path / "toy.jsonl", at_once, environment=dict).main([]) == 1
    assert capsys.readouterr().err == f"python -m benchmarks.toy: {NO_DATA}\n"


def test_tables_go_into_the_page_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.kit.study.ROOT", tmp_path)
    study, marks = _study(tmp_path / "toy.jsonl", tmp_path / "page.md"), "<!-- table: all -->\n%s<!-- end of table -->"
    (tmp_path / "page.md").write_text(marks % "")
    assert study.main(["--tables"]) == 0 and (tmp_path / "page.md").read_text() == marks % ""
    assert study.main(["--tables", "--write"]) == 0 and (tmp_path / "page.md").read_text() == marks % "False\n"
    assert capsys.readouterr().out == 2 * "all\n\nFalse\n"
    with pytest.raises(SystemExit):
        _study(tmp_path / "toy.jsonl").main(["--write"])


def test_figures_are_shown_without_words() -> None:
    assert one_line({"case": "b", "ms": 1.5, "clock": "cpu", "s": [1, 2]}) == "b: ms 1.5"


def test_a_process_that_fails_says_what_it_said() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)stream no_such_case: ended with status 2: .*invalid choice"):
        in_a_process("tokenizers.stream", "no_such_case", threads=1)
