"""The comparison of 8-bit encoders, on a toy."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kit import markdown
from benchmarks.kit.bert import Size
from benchmarks.kit.results import DATA
from benchmarks.serving.cases import Case
from benchmarks.serving.contestants import model_of

pytest.importorskip("transformers", reason="the package transformers is not installed")
from benchmarks.serving import int8

CASE = Case("toy", [[[2, 7, 8, 3], [2, 9, 3]], [[2, 5, 5, 5, 5, 3]]])


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return int8.contestants(model_of(Size("toy", 32, 64, 2, 2)))


def test_all_are_timed_and_rounded_ones_are_near_fp32(models: dict[str, Any]) -> None:
    line = int8.speed(models, CASE, rounds=2)
    assert set(line["entrants"]) == {*int8.INT8_TABLE, *int8.BF16_TABLE}
    errors = {name: entry["error"] for name, entry in line["entrants"].items()}
    assert errors[int8.PLAIN] == 0.0 and errors[int8.FP32] < 1e-4 < errors[int8.OURS] < 0.05
    assert all(1e-5 < errors[name] < 0.02 for name in int8.BF16_TABLE if name != int8.FP32)
    assert all(entry["ms"] >= 0 for entry in line["entrants"].values())


def test_figures_of_quality_are_those_of_vectors(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three paragraphs one question finds its own at once, and another finds it last."""
    turned = torch.eye(3)
    turned[0, 1] = 0.5
    given = {
        int8.PLAIN: [torch.eye(3)[[0, 1]], torch.eye(3), torch.eye(3)],
        int8.OURS: [torch.nn.functional.normalize(turned)[[0, 1]], torch.eye(3), torch.eye(3)],
    }
    monkeypatch.setattr(int8, "vectors", lambda model, texts: given[model][texts])
    found = int8.quality({name: name for name in given}, 0, 1, torch.tensor([0, 2]), 2)["entrants"]
    fp32, rounded = found[int8.PLAIN], found[int8.OURS]
    assert fp32["mean_cosine"] == fp32["least_cosine"] == 1.0 and fp32["recall_at_1"] == 0.5
    assert fp32["ndcg_at_10"] == round((1 + 1 / math.log2(3)) / 2, 5)  # one paragraph is nearer, another as near
    assert rounded["least_cosine"] == round(1 / 1.25**0.5, 5) and rounded["spearman"] < 1.0 - 1e-6 < fp32["spearman"]


def test_vectors_of_texts_do_not_depend_on_their_order(models: dict[str, Any]) -> None:
    texts = [row for batch in CASE.batches for row in batch]
    made = int8.vectors(models[int8.OURS], texts)
    assert torch.equal(int8.vectors(models[int8.OURS], texts[::-1]), made.flip(0))
    assert made.norm(dim=1).sub(1).abs().max() < 1e-5


@pytest.mark.skipif(not DATA.is_dir(), reason="the folder ../shared/data with real texts is not there")
def test_every_question_has_its_paragraph() -> None:
    questions, paragraphs, places = int8.questions_and_paragraphs()
    assert (len(questions), len(paragraphs)) == (1190, 240) and places.unique().tolist() == list(range(240))


def test_the_page_shows_what_is_stored() -> None:
    page = int8.STUDY.page.read_text(encoding="utf-8")
    assert markdown.page_with(page, int8.tables(int8.STUDY.file)) == page


def test_tables_of_what_is_stored(tmp_path: Path) -> None:
    path, names = tmp_path / "lines.jsonl", dict.fromkeys((*int8.INT8_TABLE, *int8.BF16_TABLE))
    entrants = {name: {"ms": 2.0 * n, "int8_ratio": float(n), "error": 0.0} for n, name in enumerate(names, 1)}
    figures = dict.fromkeys(("ndcg_at_10", "recall_at_1", "spearman", "mean_cosine", "least_cosine"), 0.5)
    lines = [
        {"kind": "serving_int8", "case": "int8/MiniLM/one_31", "threads": 1, "entrants": entrants},
        {"kind": "quality_int8", "case": "int8/MiniLM/quality", "threads": 1, "entrants": {int8.OURS: figures}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = int8.tables(path)
    assert "| MiniLM, one_31 | 2.0 | 2.00 | 3.00 | 4.00 |" in made["int8_speed"]
    assert "| MiniLM, one_31 | 10.0 | 1.20 | 0.40 | 1.40 | 1.60 |" in made["bf16_speed"]
    assert f"| {int8.OURS} | 0.5000 | 0.5000 | 0.5000 | 0.5000 | 0.5000 |" in made["int8_quality"]
