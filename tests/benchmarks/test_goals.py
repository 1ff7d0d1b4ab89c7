"""Goals of the matrix products beside stored figures: met, missed and owed are told apart."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import goals
from benchmarks.gpu.summary import _products
from benchmarks.registry import kernel_cases

GPU = "Made up 3000"


def timing(case: str, provider: str, mode: str = "fwd", **changes: Any) -> dict[str, Any]:
    family = case.split("/")[1]
    made = {
        "kind": "timing",
        "gpu": GPU,
        "run": "1",
        "family": family,
        "case": case,
        "provider": provider,
        "mode": mode,
    }
    return made | {"us": 100.0} | changes


def gemm(n: int, k: int, us: float, tile: dict[str, int] | None, m: int = 16384, **changes: Any) -> dict[str, Any]:
    made = {
        "kind": "gemm",
        "gpu": GPU,
        "run": "1",
        "product": "plain",
        "layout": "nt",
        "m": m,
        "n": n,
        "k": k,
        "us": us,
    }
    made |= {"source": "now", "candidate": str(tile)}
    return made | {"tile": tile, "verified": tile and True, "speedup_over_library": 1.0} | changes


def reported(tmp_path: Path, *lines: dict[str, Any]) -> dict[str, list[str]]:
    """First words of a goal's line -> its state and its figures."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found: dict[str, list[str]] = {}
    for line in goals.report(tmp_path):
        if line.startswith("    "):
            found[title].append(" ".join(line.split()))  # noqa: F821
        else:
            title = line.split(" (")[0]
            found[title] = [line.rsplit(": ", 1)[1]]
    return found


def test_without_results_all_is_owed(tmp_path: Path) -> None:
    found = reported(tmp_path)
    assert len(found) == len(goals.GOALS) and set(map(tuple, found.values())) == {("owed",)}


def test_forward_and_backward_count_together(tmp_path: Path) -> None:
    case = "kernel/linear_gelu/16384x768x3072/bf16/erf"
    lines = [
        timing(case, "bert_fast"), timing(case, "compiled", run="0", bert_fast_speedup=9.0),
        timing(case, "compiled", us=100.0, bert_fast_speedup=1.0),  # ours 100
        timing(case, "compiled", "bwd", us=300.0, bert_fast_speedup=2.0),  # ours 150
    ]  # fmt: skip
    state, *figures = reported(tmp_path, *lines)["linear_gelu over library + compiled kernel"]
    assert state == "met by 1 of 6, 5 owed"
    assert "16384x768x3072 1.60x met" in figures and figures.count("4096x768x3072 owed") == 1
    lines[-1]["bert_fast_speedup"] = 1.1
    assert reported(tmp_path, *lines)["linear_gelu over library + compiled kernel"][0] == "missed by 1 of 6, 5 owed"


def test_memory_is_that_of_one_run(tmp_path: Path) -> None:
    case = "kernel/linear_cross_entropy/4096x1024x30522/bf16/labelled"
    theirs = timing(case, "hf_full_positions", "fwd_bwd", peak_bytes=1000, bert_fast_speedup=4.0)
    title = "linear_cross_entropy's memory, of logits at every position"
    for ours, shown in ((90, "9% met"), (110, "11% MISSED")):
        lines = [timing(case, "bert_fast", "fwd_bwd", peak_bytes=ours), theirs]
        found = reported(tmp_path, *lines)
        assert f"4096x1024x30522 {shown}" in found[title]
        assert "4096x1024x30522 4.00x met" in found["linear_cross_entropy over logits at every position"]
    assert reported(tmp_path, lines[0] | {"run": "0"}, theirs)[title] == ["owed"]


def test_the_rate_is_that_of_our_fastest_tile(tmp_path: Path) -> None:
    one, two = {"block_m": 1}, {"block_m": 2}
    lines = [
        gemm(768, 3072, 90.0, None), gemm(768, 3072, 180.0, one, speedup_over_library=0.5),
        gemm(768, 3072, 100.0, two, speedup_over_library=0.9),
        gemm(3072, 768, 80.0, None, 4096), gemm(3072, 768, 100.0, two, 4096, speedup_over_library=0.8),
        gemm(768, 768, 80.0, None), gemm(768, 768, 10.0, two, verified=None, speedup_over_library=8.0),
        gemm(768, 768, 10.0, one, speedup_over_library=8.0) | {"source": "older"}, gemm(768, 768, 80.0, None),
    ]  # fmt: skip
    state, *figures = reported(tmp_path, *lines)["our matrix product, of the library's rate"]
    assert state == "missed by 1 of 26, 24 owed"
    assert {"down 16384x768x3072 90% met", "up 4096x3072x768 80% MISSED", "out 16384x768x768 owed"} <= set(figures)
    (counted,) = _products(lines[:3])
    assert counted == "matrix products: 1 with a tile of ours, 0.90x the library (median), 0 faster"
    assert _products([{"tile": {}, "error": "wrong"}])[1] == "  1 tiles: wrong" and _products([]) == []


def test_figures_of_the_cpu(tmp_path: Path) -> None:
    case = "kernel/mlp/4096x768x3072/fp32/erf"
    on_cpu = [
        timing(case, "eager", mode, gpu=None, run=None, us=100.0, bert_fast_speedup=speedup)
        for mode, speedup in (("fwd", 0.8), ("bwd", 1.6))
    ]
    saved = {"kind": "cpu", "case": "saved_bytes_per_layer/base/B8/S512", "share_of_eager": 0.36}
    found = reported(tmp_path, *on_cpu, saved)
    assert "mlp/4096x768x3072/fp32/erf 1.07x met" in found["CPU: the torch back-end over stock PyTorch"]
    assert found["what a layer keeps for backward, of the eager layer"][1:] == ["base, 8 x 512 tokens 36% MISSED"]


@pytest.mark.parametrize(
    ("family", "provider", "variant"),
    [
        ("linear_gelu", "eager", "erf"),
        ("qkv_projection", "one_linear", "joined"),
        ("linear_cross_entropy", "hf_full_positions", "labelled"),
    ],
)
def test_goals_name_cases_that_exist(family: str, provider: str, variant: str) -> None:
    wanted = {case for case, _ in goals._cases(family, variant)}
    assert len(wanted) == 6
    assert wanted <= {case.name for case in kernel_cases("gpu", [family])}


def test_products_that_goals_name_exist() -> None:
    products = pytest.importorskip("benchmarks.gemm_tuning.products")
    named = {(p.m, p.n, p.k) for p in products.PRODUCTS if (p.kind, p.layout) == ("plain", "nt")}
    wanted = {tuple(map(int, f.what.split()[1].split("x"))) for f in goals.library_rate([])}
    assert len(wanted) == 26 and wanted <= named


def test_the_command_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert goals.main([]) == 0
    assert "what a layer keeps for backward" in capsys.readouterr().out
