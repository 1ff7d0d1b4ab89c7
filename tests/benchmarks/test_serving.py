"""The comparison of encoders as they are served: on a toy, without the peers that may not be installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kit.bert import BASE, Size
from benchmarks.kit.results import DATA
from benchmarks.serving import contestants as entrants_of
from benchmarks.serving import report, start
from benchmarks.serving.answer import SHOWN
from benchmarks.serving.cases import BATCH_SIZE, Case, cases
from benchmarks.serving.contestants import Run, contestants, model_of
from benchmarks.serving.speed import measure

pytest.importorskip("transformers", reason="the package transformers is not installed")
TOY = Size("toy", 32, 64, 2, 2)
CASE = Case("toy", [[[2, 7, 8, 3], [2, 9, 3]], [[2, 5, 5, 5, 5, 3]]])


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Of the contestants that need nothing but PyTorch and transformers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entrants_of, "is_there", lambda package: False)
        found = contestants(model_of(TOY), 1, compiles=False)
    assert list(found) == ["bert_fast", "bert_fast packed", "transformers"]
    return {name: prepare(CASE) for name, prepare in found.items()}


def test_all_are_given_the_same_and_timed(runs: dict[str, Run]) -> None:
    line = measure(runs, CASE, TOY, rounds=2)
    assert line["texts"] == 3 and line["tokens"] == 13 and line["fill"] == round(13 / 14, 3)
    assert list(line["entrants"]) == list(runs)
    assert all(entry["ms"] > 0 and entry["bert_fast_ratio"] > 0 for entry in line["entrants"].values())
    assert 0 <= line["share_of_peak"] < 1 < line["peak_gflop_s"]  # of a toy it may round to 0


def test_what_is_wrong_is_not_timed(runs: dict[str, Run]) -> None:
    def wrong() -> list[torch.Tensor]:
        return [states + 0.01 for states in runs["transformers"]()]

    with pytest.raises(RuntimeError, match=r"onnxruntime: expected hidden states within 0\.001 of transformers', got"):
        measure({**runs, "onnxruntime": wrong}, CASE, TOY, rounds=1)


def test_products_are_counted_without_padding() -> None:
    case = Case("two", [[[1] * 10, [1] * 4]])
    of_weights = 2 * 12 * (4 * 768 * 768 + 2 * 768 * 3072) * 14
    of_attention = 12 * sum(2 * 2 * length * length * 768 for length in (10, 4))  # scores, and what they weigh
    assert case.gflop(BASE) == (of_weights + of_attention) / 1e9


def test_batches_have_the_fill_that_is_said_of_them() -> None:
    if not DATA.exists():
        pytest.skip("the shared texts are not there")
    for count in (2, 4):
        found = cases(count)
        assert list(found) == ["one_31", "one_128", "one_512", "as_they_come", "sorted"]
        assert [found[f"one_{length}"].lengths for length in (31, 128, 512)] == [[31], [128], [512]]
        for name, least, most in (("as_they_come", 0.52, 0.56), ("sorted", 0.85, 0.97)):
            assert [len(batch) for batch in found[name].batches] == [BATCH_SIZE] * count
            assert least < found[name].fill < most


def test_every_process_that_answers_says_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (start, entrants_of):
        monkeypatch.setattr(module, "is_there", lambda package: False)
    monkeypatch.setattr(start, "CONTESTANTS", ["bert_fast.BertModel"])  # the others import for seconds
    line = start.measure_start(TOY, threads=1, rounds=1)
    assert list(line["entrants"]) == ["bert_fast.BertModel"]
    for entry in line["entrants"].values():
        assert entry["import_s"] > 0 and entry["answer_s"] > 0 and 100 < entry["resident_mib"] <= entry["most_mib"]
    monkeypatch.setattr(start, "hidden_states", lambda model: [9.0] * SHOWN)
    with pytest.raises(RuntimeError, match=r"bert_fast.BertModel: expected hidden states within 0.001 of transform"):
        start.measure_start(TOY, threads=1, rounds=1)


def test_the_table_shows_the_newest_line_of_each_case_and_its_goal(tmp_path: Path) -> None:
    def line(case: str, ms: float, **peers: float) -> dict[str, Any]:
        entrants = {"bert_fast": {"ms": 9.0, "bert_fast_ratio": 1.1}, "bert_fast packed": {"ms": ms}}
        entrants |= {name: {"ms": 1.0, "bert_fast_ratio": ratio} for name, ratio in peers.items()}
        figures = {"threads": 2, "fill": 0.5, "share_of_peak": 0.7, "entrants": entrants}
        return {"kind": "serving", "case": f"serving/MiniLM/{case}", **figures}

    path = tmp_path / "serving.jsonl"
    lines = [
        line("one_31", 8.0, transformers=2.0),
        line("sorted", 7.0, transformers=1.5, openvino=1.1),
        line("one_31", 6.0, transformers=1.0),
    ]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines), encoding="utf-8")
    assert report.render_speed(path).splitlines()[2:] == [
        "| MiniLM, sorted | 2 | 0.50 | 9.0 | 7.0 | 70% | 1.50 | 1.10 | 1.10x, missed (1.15x) |",
        "| MiniLM, one_31 | 2 | 0.50 | 9.0 | 6.0 | 70% | 1.00 |  | **1.00x** (1.00x) |",
    ]
