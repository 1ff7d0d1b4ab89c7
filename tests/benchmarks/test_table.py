"""What README, docs/results.md and docs/speed.svg show is what is stored."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table
from benchmarks.kit.markdown import page_with
from benchmarks.kit.results import RESULTS, read_lines


def test_pages_and_picture_are_of_the_newest_stored_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main(["--check"]) == 0, capsys.readouterr().out


@pytest.fixture
def other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stored results, which the tables are made of from here on."""
    for file in RESULTS.glob("*.jsonl"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    return tmp_path


def append(path: Path, **fields: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def test_a_new_result_makes_all_of_them_stale(other_results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = table.CASES[0].stored
    newest = [line for line in read_lines(other_results / "cpu.jsonl") if line["case"] == name][-1]
    append(other_results / "cpu.jsonl", **newest | {"ratio": 9.87})
    assert table.main(["--check"]) == 1
    stale = set(re.findall(r"^(\S+): stale", capsys.readouterr().out, re.MULTILINE))
    assert stale == {"README.md", "docs/results.md", "docs/speed.svg"}


def test_readme_tells_of_a_gpu_once_a_whole_step_was_timed_on_it(other_results: Path) -> None:
    for path in other_results.glob("*.jsonl"):
        if any(line.get("gpu") for line in read_lines(path)):
            path.unlink()
    assert "GPU" not in table.render_front()
    append(other_results / "some-gpu.jsonl", kind="verify", gpu="Some GPU", case="kernel/x", ok=True, kernels={})
    assert "GPU" not in table.render_front()
    for provider, speedup in {"bert_fast": 1.0, "fused": 1.6, "sdpa": 2.4}.items():
        fields = {"case": "step/base/full@128/B256", "provider": provider, "bert_fast_speedup": speedup, "ms": speedup}
        append(other_results / "some-gpu.jsonl", kind="step", gpu="Some GPU", run="1", **fields)
    expected = "| Some GPU, bf16 | pre-training, BERT-base, 128 tokens | **1.5x** | **2.4x** |  |"
    assert expected in table.render_front().splitlines()


def test_readme_tells_of_cross_encoders_once_both_kinds_of_work_were_timed(other_results: Path) -> None:
    def rows() -> list[str]:
        return [row for row in table.render_front().splitlines() if "CrossEncoder" in row]

    (other_results / "cpu.jsonl").unlink()
    cases = sorted(table.CROSS, key=lambda case: "/train/" in case)  # all scores first
    for number, case in enumerate(cases, start=1):
        line = {"kind": "cpu", "processor": "Some CPU", "threads": 1, "case": case, "ratio": 0.5 + number}
        append(other_results / "cpu.jsonl", **line)
        assert len(rows()) == ("/train/" in case)
    assert rows()[0].startswith("| Some CPU, 1 thread, fp32 |")
    assert "| scores **1.5 to 4.5x**, training **5.5 to 8.5x** |" in rows()[0]


def test_every_table_has_its_place() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in table.PAGES)
    assert set(re.findall(r"<!-- table: (\w+) -->", shown)) == set(table.TABLES)


def test_a_mark_that_names_no_table_is_refused() -> None:
    for name in ("other", "two words"):
        with pytest.raises(ValueError, match=f"table: expected one of speed, got '{name}'"):
            page_with(f"<!-- table: {name} -->\n<!-- end of table -->", {"speed": "| |"})
