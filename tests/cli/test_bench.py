"""`bert-fast bench`: the picture, the page, and what it says where something is missing or wrong."""

import dataclasses
import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from bert_fast.bench import cases, measuring
from bert_fast.bench.measuring import Timing
from bert_fast.bench.picture import Bar, Group, Picture, as_svg, as_text
from bert_fast.cli import main

LENGTHS = Path(__file__).resolve().parents[3] / "shared" / "data" / "length_distributions" / "single_books.json"
PICTURE = Picture("Speed <of> it", (Group("A & B", (Bar("fast", 4.0), Bar("slow", 0.5))),), ("a note",))


def test_it_draws_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    page = tmp_path / "bench.html"
    assert main.main(["bench", "--quick", "--seconds", "0", "--output", str(page)]) == 0
    shown = capsys.readouterr().out
    assert all(case.label in shown for case in cases.cases_of((cases.TINY,)))
    text = page.read_text(encoding="utf-8")
    assert "both models agree" in text and "<svg" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # it fetches nothing


def test_models_that_disagree_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    real = measuring.fuse

    def wrong(model: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            list(model.parameters())[-1].add_(1.0)  # what the last layer norm adds
        return real(model)

    monkeypatch.setattr(measuring, "fuse", wrong)
    page = tmp_path / "bench.html"
    assert main.main(["bench", "--quick", "--seconds", "0", "--output", str(page)]) == 1
    assert "FAILED: training, padded batch" in capsys.readouterr().out
    assert "4 of 4 comparisons disagree" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("device", "says"), [("cuda:99", "--device: 'cuda:99'"), ("nowhere", "--device: 'nowhere'")])
def test_a_device_that_is_not_there(device: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "--quick", "--device", device]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("output", ["no/such/folder/bench.html", "."])
def test_a_page_that_cannot_be_written_is_said_before_anything_is_timed(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "compare", None)
    assert main.main(["bench", "--output", output]) == 1
    assert f"--output: expected a file in a folder that is there, got {output}" in capsys.readouterr().err


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main.main(["bench"]) == 1
    assert "pip install transformers" in capsys.readouterr().err


def test_a_ratio_is_of_the_same_round() -> None:
    fused, untouched = Timing((1, 1, 1), (1.0, 2.0, 4.0)), Timing((1, 1, 1), (3.0, 6.0, 4.0))
    result = measuring.Result(cases.CASES[0], fused, untouched, 1.0, 0.0)
    assert result.ratio == 3.0 and dataclasses.replace(result, fused=untouched, untouched=fused).ratio == 1 / 3


@pytest.mark.skipif(not LENGTHS.is_file(), reason="lengths of real texts do not lie beside the project")
def test_lengths_are_those_of_sentences_of_novels() -> None:
    known = sorted(json.loads(LENGTHS.read_text())["sample_lengths"])
    for size in {case.size for case in cases.CASES}:
        count = len(size.lengths)
        assert size.lengths == tuple(known[int((i + 0.5) / count * len(known))] for i in range(count))


def test_bars_are_as_long_as_their_ratios() -> None:
    shown = as_text(PICTURE, width=60).splitlines()
    fast, slow = (next(line for line in shown if name in line) for name in ("fast", "slow"))
    unit = fast.count("\u2592")  # of 1x
    assert unit > 5 and abs(fast.count("\u2588") - 3 * unit) <= 3
    assert slow.count("\u2588") == 0 and abs(slow.count("\u2592") - unit / 2) <= 1
    assert max(map(len, shown)) <= 60 and as_text(PICTURE, is_ascii=True).isascii()
    root = ElementTree.fromstring(as_svg(PICTURE))  # well formed, whatever the names hold
    boxes = [box.attrib for box in root.iter("{http://www.w3.org/2000/svg}rect")]
    ours, theirs = ([float(box["width"]) for box in boxes if box["class"] == kind] for kind in ("ours", "theirs"))
    assert [round(width / theirs[0], 2) for width in ours] == [4.0, 0.5] and theirs[0] == theirs[1]


def test_a_picture_of_nothing_is_empty() -> None:
    empty = Picture("Nothing", ())
    assert as_text(empty).startswith("Nothing") and ElementTree.fromstring(as_svg(empty)) is not None
