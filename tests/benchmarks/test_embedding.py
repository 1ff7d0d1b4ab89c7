"""Benchmarks of embedding models, on the CPU: a contestant takes part only with the right vectors."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.embedding import (
    batch_memory,
    block_diagonal,
    contrastive,
    cross_encoders,
    efficiency,
    on_device,
    report,
    splade,
)
from benchmarks.embedding.__main__ import EMBEDDING_JOBS, STUDY
from benchmarks.embedding.on_device import CASES, PROVIDERS, SMALL_CASES, least_cosine
from benchmarks.gpu.summary import shown
from benchmarks.kit.bert import BY_NAME
from benchmarks.kit.markdown import page_with
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
            rounded = 0.01 * line["real_tokens_per_s"] + 0.1 * line["tokens_per_text"]  # texts/s have one decimal
            assert abs(line["texts_per_s"] * line["tokens_per_text"] - line["real_tokens_per_s"]) <= rounded
            assert f"{line['provider']}: " in shown(line) and "real_tokens_per_s" in shown(line)


@pytest.mark.parametrize("case", SMALL_CASES, ids=["step", "encode"])
def test_wrong_vectors_are_not_timed(case: on_device.EmbeddingCase, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
    vectors = on_device.Contestant.vectors

    def wrong(self: Any) -> np.ndarray:
        found = vectors(self)
        return found if self.provider == "bert_fast" else found[::-1]

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


def lines_of_a_cpu() -> list[dict[str, Any]]:
    steps = {
        "case": "contrastive/minilm/32x8/1", "whole_cpu_s": 3.0, "theirs_cpu_s": 4.5, "cached_cpu_s": 4.0,
        "theirs_cached_cpu_s": 6.0, "cached_over_whole": 1.333, "ratio": 1.5, "cached_ratio": 1.5, "fill": 0.5,
        "goal": 1.8,
    }  # fmt: skip
    memory = {"case": "batch_memory/tiny", "pairs": [1024, 2048], "bytes": [10**7, 3 * 10**7]}
    sparse = {
        "case": "splade/minilm/16/1", "pairs": 16, "fill": 0.5, "bert_fast_cpu_s": 2.0, "theirs_cpu_s": 4.5,
        "ratio": 2.25,
    }  # fmt: skip
    sizes = {"texts": 32, "length": 256, "bert_fast_bytes": 2 * 10**8, "theirs_bytes": 5 * 10**9, "share": 0.04}
    cross = {
        "case": "cross_encoder/minilm/score/sorted", "pairs": 64, "fill": 0.98, "untouched_cpu_s": 4.0, "ratio": 1.05,
        "compiled_cpu_s": 3.2, "fused_cpu_s": 2.0,
    }  # fmt: skip
    models = {
        "case": "efficiency/minilm/stsb", "texts": 96, "real_tokens": 1234, "untouched_cpu_s": 1.5,
        "compiled_over_untouched": 1.1, "bf16_over_untouched": 0.25, "fused_over_untouched": 1.6,
        "fused_bf16_over_untouched": 1.3,
    }  # fmt: skip
    memory |= batch_memory.extrapolated([1024, 2048], [10**7, 3 * 10**7])
    return [
        steps | {"cached_ratio": 9.0}, steps, memory, sparse, {"case": "splade_memory/base", **sizes}, cross, models,
    ]  # fmt: skip


def test_what_is_shown_is_what_is_measured() -> None:
    pairs = {f"{case.name}/{order}" for case in cross_encoders.CASES for order in cross_encoders.ORDERS}
    models = set(map(efficiency.name_of, efficiency.MODELS))
    others = {name for name in EMBEDDING_JOBS if not name.startswith(("cross_encoder/", "efficiency/"))}
    assert {case.name for case in cross_encoders.CASES} | others | models == set(EMBEDDING_JOBS)
    shown = {*report.STEPS, *report.SCORES, *report.MEMORY, *report.SPLADE, *report.SPLADE_MEMORY, *report.PACKED}
    assert shown == others and set(report.CROSS) == pairs
    assert set(report.EFFICIENCY) == {f"{model}/{data}" for model in models for data in efficiency.TEXTS}


def test_tables_of_the_newest_figures() -> None:
    made = report.tables(lines_of_a_cpu())
    assert "| cached | 4.00 | 6.00 | **1.50x** (1.80x) |" in made["steps"]
    assert "| cached over at once | 1.33x |  |  |" in made["steps"]
    assert "| tiny | 2,048 | 30 MB | 17 MB |" in made["memory"]
    # 20 MB for 1,024 pairs more, 63,488 of them beyond 30 MB.
    assert "| tiny | 65,536, by a line | 1,270 MB | 17,180 MB |" in made["memory"]
    assert "| MiniLM | 16 | 0.50 | 2.00 | 4.50 | **2.25x** |" in made["splade"]
    assert "| 32 of 256 tokens | 200 MB | 5,000 MB | 4.0% |" in made["splade_memory"]
    assert "| MiniLM, score, sorted | 0.98 | 16.0 | 20.0 | 32.0 | **1.05x** |" in made["cross_encoders"]
    assert "| MiniLM, stsb | 96 | 1,234 | 1.50 | 1.10x | 0.25x | **1.60x** | 1.30x |" in made["efficiency"]
    assert set(report.tables([]).values()) == {"Nothing is stored."}


def test_the_page_shows_what_is_stored() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    assert STUDY.tables is not None and STUDY.page == report.PAGE
    assert page_with(page, STUDY.tables(STUDY.file)) == page, "run `python -m benchmarks.embedding --tables --write`"


def test_steps_of_both_sides_are_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
    try:
        result = contrastive.run_contrastive(3, 2, 1, 1)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    assert result["pairs"] == 3 and 0 < result["fill"] <= 1
    assert all(result[f"{name}_cpu_s"] > 0 for name in ("whole", "cached", "theirs", "theirs_cached"))
    monkeypatch.setattr(contrastive, "in_batch", lambda made: made.square().mean() * 99)
    with pytest.raises(RuntimeError, match="losses differ"):
        contrastive.run_contrastive(3, 2, 1, 1)


def test_steps_of_splade_are_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
    try:
        result = splade.run_splade("tiny", 3, 1, 1)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    assert result["pairs"] == 3 and 0 < result["fill"] < 1
    assert all(result[f"{side}_cpu_s"] > 0 for side in splade.SIDES)
    monkeypatch.setattr("bert_fast.models.heads.splade", lambda *given, **options: given[0].new_ones(3, 30522))
    with pytest.raises(RuntimeError, match="losses differ"):
        splade.run_splade("tiny", 3, 1, 1)


@pytest.fixture
def eagerly_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time for the compiler."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kw: compile_module(self, backend="eager", **kw))


def small_results(work: str) -> list[dict[str, Any]]:
    pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
    try:
        return list(cross_encoders.run_case(cross_encoders.CrossCase("tiny", work, 2, 3), 1))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("work", ["score", "train"])
@pytest.mark.usefixtures("eagerly_compiled")
def test_cross_encoders_are_timed_if_they_agree(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = small_results(work)
    assert [result["case"] for result in results] == [
        f"cross_encoder/tiny/{work}/{order}" for order in cross_encoders.ORDERS
    ]
    for result in results:
        assert result["pairs"] == 6 and result["threads"] == 1 and result["best_other"] in ("untouched", "compiled")
        assert all(result[f"{name}_cpu_s"] > 0 for name in cross_encoders.PROVIDERS)

    def wrong(model: Any) -> Any:
        with torch.no_grad():
            model[0].model.classifier.weight[0, 0] += 1e-3
        return fuse(model)

    fuse = cross_encoders.fuse
    monkeypatch.setattr(cross_encoders, "fuse", wrong)
    with pytest.raises(RuntimeError, match=r"fused: .* differs by .*: nothing to time"):
        small_results(work)


@pytest.mark.usefixtures("eagerly_compiled")
def test_models_of_the_page_on_efficiency_are_timed_if_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
    try:
        for data, (mean, deviation, count) in efficiency.TEXTS.items():
            lengths = list(map(len, efficiency.texts_of(data)))
            assert len(lengths) == count and abs(np.mean(lengths) - mean) < deviation
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    monkeypatch.setattr(efficiency, "BASE", BY_NAME["tiny"])
    monkeypatch.setattr(efficiency, "TEXTS", {"stsb": (38.9, 13.9, 3), "long": (300.0, 1.0, 2)})
    results = list(efficiency.run_efficiency("base, 4 layers", 1))
    assert [result["case"] for result in results] == [
        "efficiency/base, 4 layers/stsb",
        "efficiency/base, 4 layers/long",
    ]
    assert results[0]["texts"] == 3 and all(results[0][f"{name}_cpu_s"] > 0 for name in efficiency.PROVIDERS)

    def wrong(model: Any) -> Any:
        with torch.no_grad():
            model[0].model.embeddings.word_embeddings.weight.neg_()
        return fuse(model)

    fuse = efficiency.fuse
    monkeypatch.setattr(efficiency, "fuse", wrong)
    with pytest.raises(RuntimeError, match="fused: vectors differ"):
        list(efficiency.run_efficiency("base, 4 layers", 1))


def test_pairs_of_cross_encoders() -> None:
    """A query's first passage answers it and no other does; sorted batches hardly need padding."""
    try:
        answered = set(cross_encoders.answered())
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    for case in cross_encoders.CASES:
        for batch in case.batches("as they come"):
            assert len({query for query, _ in batch}) == 1 and len(batch) == case.passages
            assert [pair in answered for pair in batch] == [True] + [False] * (case.passages - 1)
        for batch in case.batches("sorted"):
            lengths = [
                len(ids) for ids in cross_encoders.tokenizer()(*map(list, zip(*batch, strict=True)))["input_ids"]
            ]
            assert len(lengths) == case.passages and min(lengths) >= 0.9 * max(lengths)


def test_rows_of_several_texts_give_what_padded_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    for name, small in {"BASE": BY_NAME["tiny"], "LAYERS": 1, "TEXTS": 5, "ROW": 12}.items():
        monkeypatch.setattr(block_diagonal, name, small)
    monkeypatch.setattr(block_diagonal, "MIXES", {"small": lambda: np.array([3, 7, 1, 10, 4])})
    result = block_diagonal.run_mix("small", 1)
    assert result["fill"] == 0.5 and result["fill_of_rows"] == round(25 / 33, 4) and result["real_tokens"] == 25
    rows = block_diagonal.rows_of

    def without_a_mask(texts: Any, rows: Any) -> Any:
        inputs, owner = laid_out(texts, rows)
        return inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])}, owner

    laid_out = block_diagonal.laid_out
    assert rows([3, 7, 1, 10, 4]) == [[3, 2], [1, 4], [0]]
    monkeypatch.setattr(block_diagonal, "laid_out", without_a_mask)
    with pytest.raises(RuntimeError, match="hidden states differ"):
        block_diagonal.run_mix("small", 1)


def test_memory_does_not_grow_with_the_square() -> None:
    """Of a batch whose scores would be seven times as much as all that a step of it needs."""
    result = batch_memory.run_memory("tiny", (256, 16384))
    assert result["bytes"][-1] < 4 * 16384**2 / 4
    assert result["bytes"][0] < result["bytes"][1]
