import json
from pathlib import Path

import pytest

from bert_fast.demo.output import OutputFolder
from bert_fast.demo.requirements import DemoError


def test_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    folder = OutputFolder(tmp_path)
    for page in ("first", "second"):
        folder.claim()
        folder.write_report(page)
        folder.write_results({"finished": True})
        assert (tmp_path / "report.html").read_text() == page
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "report.html", "results.json"]


@pytest.mark.parametrize("name", ["report.html", "results.json", "checkpoint"])
def test_refuses_what_it_did_not_make(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.mkdir() if name == "checkpoint" else path.write_text('{"mine": 1}')
    with pytest.raises(DemoError, match=f"holds {name}, which this command did not make"):
        OutputFolder(tmp_path).claim()
    assert [found.name for found in tmp_path.iterdir()] == [name]
    assert path.is_dir() or path.read_text() == '{"mine": 1}'


def test_an_interrupted_run_can_be_repeated(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "new" / "folder")
    folder.claim()
    folder.checkpoint.mkdir()
    assert json.loads((folder.path / "results.json").read_text()) == {"made_by": "bert-fast demo", "finished": False}
    folder.claim()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match="cannot be written"):
        OutputFolder(tmp_path / "file").claim()


def test_the_old_report_survives_a_failure(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    folder.claim()
    folder.write_report("old")
    with pytest.raises(UnicodeEncodeError):
        folder.write_report("new \ud800")
    assert folder.report.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results.json"]
