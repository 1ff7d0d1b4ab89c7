"""Benchmarks of embedding models, on the CPU: everybody who can takes part, and only with the right vectors."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.embedding import on_device
from benchmarks.embedding.on_device import CASES, PROVIDERS, SMALL_CASES, least_cosine
from benchmarks.gpu.summary import shown
from tests.benchmarks.conftest import CpuRun

FIELDS = {
    "case", "provider", "ms", "ms_p20", "ms_p80", "texts_per_s", "real_tokens_per_s", "tokens_per_text", "peak_bytes",
    "bert_fast_speedup", "rounds",
}  # fmt: skip


def test_all_are_timed_on_a_device(cpu_run: CpuRun) -> None:
    pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
    assert cpu_run.part("embedding") == 0
    lines, left_out = cpu_run.lines("embedding"), cpu_run.lines("skipped")
    for case in SMALL_CASES:
        mine = [line for line in lines if line["case"] == case.name]
        others = {line["provider"]: line["reason"] for line in left_out if line["case"] == case.name}
        assert [line["provider"] for line in mine] + list(others) == list(PROVIDERS)
        assert set(others) == {"st_packed"} and "Flash" in others["st_packed"], "flash attention has no CPU kernels"
        for line in mine:
            assert set(line) >= FIELDS
            assert line["peak_bytes"] is None
            assert 0 < line["ms_p20"] <= line["ms"] <= line["ms_p80"]
            assert line["texts_per_s"] * line["tokens_per_text"] == pytest.approx(line["real_tokens_per_s"], rel=0.01)
            assert f"{line['real_tokens_per_s']:12,.0f} tokens/s" in shown(line)


@pytest.mark.parametrize("case", SMALL_CASES, ids=["step", "encode"])
def test_wrong_vectors_are_not_timed(case: on_device.EmbeddingCase, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
    vectors = on_device.Contestant.vectors

    def wrong(self: Any) -> np.ndarray:
        found = vectors(self)
        return found if "Embedding" in type(self.model).__name__ or hasattr(self.model, "embeddings") else found[::-1]

    monkeypatch.setattr(on_device.Contestant, "vectors", wrong)
    results = {result["provider"]: result for result in on_device.time_embedding(case, torch.device("cpu"), 1)}
    assert results["st"]["skipped"].startswith("red: vectors differ")
    assert "ms" in results["bert_fast"]


def test_cosines_tell_texts_apart() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 32)) + 100.0
    assert least_cosine(rows, rows + 1e-3) > 0.999
    assert least_cosine(rows, np.roll(rows, 1, axis=0)) < 0.5


def test_texts_are_as_long_as_they_are_meant_to_be() -> None:
    """Goals are about 50 tokens a text."""
    for case in (*CASES, *SMALL_CASES):
        lengths = [np.array([len(text.split()) + 2 for text in column]) for column in case.texts()]
        assert all(len(column) == case.count for column in lengths)
        assert max(column.max() for column in lengths) <= case.longest
        if case.mode == "encode" and case in CASES:
            assert abs(lengths[0].mean() - 50) < 1
        if case.mode == "step":
            assert len(lengths) == 2
    assert {(case.shape, case.mode) for case in CASES} == {
        (s, m) for s in ("minilm", "base") for m in ("step", "encode")
    }
