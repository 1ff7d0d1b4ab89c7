"""Tuning of matrix products: right before fast, tables that the kernels read, and what the results say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from benchmarks.gemm_tuning import __main__ as command
from benchmarks.gemm_tuning import products
from benchmarks.gemm_tuning import table as gemm_table
from benchmarks.gemm_tuning import timing as gemm_tuning
from benchmarks.gemm_tuning.products import PRODUCTS, SMALL_PRODUCTS, Operands, Product
from benchmarks.gpu import parts
from benchmarks.gpu.summary import _products
from benchmarks.kernels import timing as kernels
from bert_fast.triton import _gemm_tiles
from bert_fast.triton._gemm_tiles import Tile, row_major
from tests.benchmarks.conftest import CpuRun

CPU = torch.device("cpu")
FAST, SLOW, WRONG, TOO_LARGE = Tile(64, 64, 64), Tile(32, 32, 32), Tile(16, 16, 16), Tile(128, 256, 64)


def in_fp32(product: Product, given: Operands) -> dict[str, torch.Tensor]:
    return {name: t.float() for name, t in products.truth(product, given).items()}


class VirtualClock:
    """Time that passes by what a launch is said to take, so that a busy machine changes nothing."""

    name, host_us, now = "virtual", 0.0, 0.0

    def microseconds(self, launches: list[Any]) -> float:
        before = VirtualClock.now
        for launch in launches:
            launch()
        return (VirtualClock.now - before) / len(launches)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides by plain torch: one tile of ours is right, one is slow, one wrong, one does not run."""

    def compute(product: Product, given: Operands, tile: Tile | None) -> dict[str, torch.Tensor]:
        if tile == TOO_LARGE:
            raise RuntimeError("out of resources: shared memory")
        VirtualClock.now += {None: 100.0, FAST: 80.0, SLOW: 400.0}.get(tile, 1.0)
        return {name: t + (1.0 if tile == WRONG else 0.0) for name, t in in_fp32(product, given).items()}

    monkeypatch.setattr(gemm_tuning, "compute", compute)
    monkeypatch.setattr(gemm_tuning, "make_clock", lambda device: VirtualClock())
    monkeypatch.setattr(gemm_tuning, "tiles_for", lambda *_: [TOO_LARGE, WRONG, FAST, SLOW])
    monkeypatch.setattr(kernels, "kernel_digests", dict)


@pytest.mark.parametrize("product", [pytest.param(p, id=p.name) for p in SMALL_PRODUCTS])
def test_only_what_is_right_is_timed(product: Product, stand_ins: None) -> None:
    results = {r["candidate"]: r for r in gemm_tuning.time_product(product, CPU, rounds=6)}
    assert list(results) == [gemm_tuning.describe(t) for t in (TOO_LARGE, WRONG)] + [
        "library", *(gemm_tuning.describe(t) for t in (FAST, SLOW))
    ]  # fmt: skip
    assert "out of resources" in results[gemm_tuning.describe(TOO_LARGE)]["error"]
    wrong = results[gemm_tuning.describe(WRONG)]
    assert wrong["error"].startswith("AssertionError: gemm.") and "us" not in wrong and "verified" not in wrong
    fast, slow, library = (results[name] for name in (*map(gemm_tuning.describe, (FAST, SLOW)), "library"))
    assert (fast["rounds"], slow["rounds"]) == (6, gemm_tuning.SCREENING_ROUNDS), "far behind: drops out"
    assert (fast["us"], slow["us"], library["us"]) == (80.0, 400.0, 100.0)
    assert (fast["speedup_over_library"], slow["speedup_over_library"]) == (1.25, 0.25)
    assert library["tile"] is None and "verified" not in library and library["rounds"] == 6
    assert Tile.from_json(fast["tile"]) == FAST and fast["verified"] is True
    for result in results.values():
        named = (result["product"], result["layout"], result["m"], result["n"], result["k"], result["dtype"])
        assert named == (product.kind, product.layout, product.m, product.n, product.k, product.dtype)
        assert result["source"] == _gemm_tiles.source_hash()
    assert {"tflop_s", "us_p20", "us_p80"} <= set(fast)


@pytest.mark.parametrize("product", [pytest.param(p, id=p.name) for p in SMALL_PRODUCTS if p.kind == "accumulate"])
def test_checks_leave_the_operands_alone(product: Product) -> None:
    given = products.operands(product, CPU)
    assert given.out is not None
    before = given.out.clone()
    results = gemm_tuning._once(product, given, None)  # the library's product runs on a CPU, too
    torch.testing.assert_close(results["out"], products.truth(product, given)["out"].float())
    assert torch.equal(given.out, before)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", _gemm_tiles.KINDS)
def test_the_real_kernels_are_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides run: a candidate that is wrong would have an error instead of a time."""
    monkeypatch.setattr(gemm_tuning, "tiles_for", lambda *_: [_gemm_tiles.INTERPRETER_TILE])
    monkeypatch.setattr(gemm_tuning, "WARMUP", 0)
    product = next(product for product in SMALL_PRODUCTS if product.kind == kind)
    library, ours = gemm_tuning.time_product(replace(product, dtype="fp16"), CPU, rounds=1)
    assert library["us"] > 0 and ours["us"] > 0


def test_the_list_has_every_product_of_a_layer_once() -> None:
    names = [product.name for product in PRODUCTS]
    assert PRODUCTS[0].flops == 2 * 16384 * 3072 * 768
    assert len(names) == len(set(names))
    assert {p.kind for p in PRODUCTS} == set(_gemm_tiles.KINDS)
    tokens = {min(p.m, p.k) if p.layout == "tn" else p.m for p in PRODUCTS if "vocabulary" not in p.what}
    assert {1024, 65536} <= {p.k for p in PRODUCTS if p.layout == "tn"} | tokens
    assert all(p.m == 16384 or p.k == 16384 for p in PRODUCTS[:28] if "vocabulary" not in p.what), "most telling first"
    for size, (h, i) in {"base": (768, 3072), "large": (1024, 4096)}.items():
        # Forward: four widths; each with two gradients, of which the input's of the MLP's second half is fused.
        plain = {(p.layout, p.n, p.k) for p in PRODUCTS if p.kind == "plain" and p.what.startswith(size)}
        for n, k in ((3 * h, h), (h, h), (i, h), (h, i)):
            assert ("nt", n, k) in plain
        assert ("derivative", i, h) in {(p.kind, p.n, p.k) for p in PRODUCTS}


@pytest.mark.parametrize("product", [pytest.param(p, id=p.name) for p in SMALL_PRODUCTS])
def test_operands_lie_in_memory_as_the_layout_says(product: Product) -> None:
    given = products.operands(product, CPU)
    assert "".join("nt"[row_major(operand)[1]] for operand in (given.a, given.b)) == product.layout
    for t in (given.a, given.b, given.x, given.out):
        assert t is None or max(t.stride()) * t.element_size() % 128 == 0, "as rows of logits begin"
    assert (given.a.shape, given.b.shape) == ((product.m, product.k), (product.k, product.n))


class FakeGpu:
    type = "cuda"


def test_sums_are_split_where_tiles_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    from bert_fast.triton import _launch

    loads = Tile(128, 128, 64, warp_specialize=True)
    monkeypatch.setattr(_gemm_tiles, "candidates", lambda name, dtype: (Tile(128, 128, 64), loads, Tile(64, 64, 32)))
    monkeypatch.setattr(_launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(_launch, "num_multiprocessors", lambda device: 132)
    few = gemm_tuning.tiles_for(Product("wgrad", "plain", "tn", 768, 768, 16384), FakeGpu())
    assert [(t.block_m, t.split_k) for t in few] == [(128, 1), (128, 2), (128, 4), (64, 1)]
    short = gemm_tuning.tiles_for(Product("wgrad", "plain", "tn", 768, 768, 600), FakeGpu())
    assert [(t.block_m, t.split_k) for t in short] == [(128, 1), (128, 2), (64, 1)]
    many = gemm_tuning.tiles_for(Product("fwd", "plain", "nt", 16384, 768, 768), FakeGpu())
    assert [t.split_k for t in many] == [1, 1]
    assert gemm_tuning.tiles_for(Product("fwd", "plain", "nt", 16384, 768, 768), CPU) == []
    alone = gemm_tuning.tiles_for(Product("fwd", "plain", "nt", 16384, 768, 768), FakeGpu(), is_specialized=True)
    assert alone == [loads]
    # What compiles alike is compiled once: every kind, layout and alignment with each tile.
    jobs = gemm_tuning.preparations(FakeGpu())
    assert len(jobs) == len({(p.kind, p.layout, p.has_bias, p.m % 8, p.n % 8, p.k % 8, t) for p, t in jobs})
    assert {p.kind for p, _ in jobs} == set(_gemm_tiles.KINDS) and len(jobs) < 100
    assert not any(tile.warp_specialize for _, tile in jobs)


def line(tile: Tile | None, us: float, **changes: Any) -> dict[str, Any]:
    made = {
        "kind": "gemm", "gpu": "Made up 3000", "architecture": "sm_90", "multiprocessors": 132, "run": "1",
        "time": "2000-01-01", "triton": "3.6.0", "torch": "2.11",
        "product": "activation", "layout": "nt", "dtype": "bf16", "m": 16384, "n": 3072, "k": 768, "us": us,
        "source": _gemm_tiles.source_hash(), "commit": "c0ffee",
        "candidate": str(tile), "tile": tile and tile.to_json(),
    }  # fmt: skip
    return made | ({"verified": True} if tile else {}) | {"speedup_over_library": round(100.0 / us, 3)} | changes


def choices(*lines: dict[str, Any]) -> dict[tuple[Any, ...], Any]:
    made = gemm_table.table(lines, _gemm_tiles.source_hash())
    assert made is not None
    return {(e["kind"], e["m"], e["n"], e["k"]): e["tile"] and Tile.from_json(e["tile"]) for e in made["entries"]}


UP = ("activation", 16384, 3072, 768)


def test_a_run_ends_with_the_fastest_tile_beside_the_library() -> None:
    timed = [line(None, 100.0), line(FAST, 200.0), line(SLOW, 111.0)]
    failed = {"tile": {}, "error": "wrong"}
    assert _products([*timed, failed]) == [
        "matrix products: 1 with a tile of ours, 0.90x the library (median), 0 faster", "  1 tiles: wrong"
    ]  # fmt: skip
    assert _products([]) == []


def test_the_fastest_counts_unless_noise_made_it_so() -> None:
    assert choices(line(None, 100.0), line(FAST, 90.0), line(SLOW, 80.0)) == {UP: SLOW}
    assert choices(line(None, 100.0), line(FAST, 90.0), line(SLOW, 89.0)) == {UP: FAST}
    assert choices(line(None, 100.0), line(FAST, 105.0)) == {UP: None}
    again = [line(None, 120.0), line(SLOW, 95.0, speedup_over_library=1.26)]  # of another process, with another clock
    assert choices(line(None, 100.0), line(FAST, 90.0), *again) == {UP: SLOW}
    assert choices(line(None, 100.0), line(FAST, 90.0, verified=None)) == {UP: None}
    error = {k: v for k, v in line(SLOW, 1.0, error="wrong").items() if k not in {"us", "verified"}}
    assert choices(line(None, 100.0), error, line(FAST, 90.0)) == {UP: FAST}


def test_the_newest_line_of_each_tile_counts_if_it_is_of_the_present_kernels() -> None:
    old = [line(None, 100.0, run="0"), line(SLOW, 10.0, run="0")]
    assert choices(*old, line(None, 100.0), line(FAST, 90.0)) == {UP: SLOW}, "runs add up"
    assert choices(*old, line(None, 100.0), line(SLOW, 110.0), line(FAST, 90.0)) == {UP: FAST}
    failed = {k: v for k, v in line(SLOW, 1.0, error="wrong").items() if k not in {"us", "verified"}}
    assert choices(*old, failed) == {UP: None}, "what is wrong by now"
    other = line(SLOW, 10.0, source="other")
    assert choices(line(None, 100.0), line(FAST, 90.0), other, line(None, 100.0, source="other")) == {UP: FAST}
    for useless in (other, line(None, 1.0, gpu=None), line(FAST, 90.0)):  # the last: nothing to compare with
        assert gemm_table.table([useless], _gemm_tiles.source_hash()) is None
    down = dict(product="derivative", triton="3.7.0", time="2000-01-02")
    mixed = [line(None, 100.0), line(FAST, 90.0), line(None, 100.0, **down), line(FAST, 90.0, **down)]
    assert set(choices(*mixed)) == {("derivative", 16384, 3072, 768)}, "one minor version of Triton"


def test_what_is_written_is_what_the_kernels_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, tables = tmp_path / "results", tmp_path / "tuned"
    results.mkdir()
    tables.mkdir()
    arguments = ["--write-table", "--results", str(results), "--output", str(tables)]
    assert command.main(arguments) == 1
    assert "nothing was written" in capsys.readouterr().out
    wgrad = dict(product="plain", layout="tn", m=768, n=3072, k=16384)
    lines = [line(None, 100.0), line(FAST, 90.0), line(None, 50.0, **wgrad), line(FAST, 110.0, **wgrad)]
    (results / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert command.main(arguments) == 0
    assert "2 products, 1 by our kernel" in capsys.readouterr().out
    path = tables / "made_up_3000.json"
    found, reason = _gemm_tiles.read(path, "3.6.1")
    assert found is not None, reason
    assert found.find("activation", "nt", torch.bfloat16, 16384, 3072, 768).tile == FAST
    assert found.find("activation", "nt", torch.bfloat16, 20000, 3072, 768).tile == FAST
    assert found.find("plain", "tn", torch.bfloat16, 768, 3072, 16384).tile is None
    assert found.find("plain", "nt", torch.bfloat16, 768, 3072, 16384) is None
    content = json.loads(path.read_text())
    assert len(content["launches"]) == 16
    assert (content["commit"], content["tritons"], content["device"]) == ("c0ffee", ["3.6"], "Made up 3000")
    assert sum('"kind"' in line for line in path.read_text().splitlines()) == 2, "a line for each entry"
    (results / "a.jsonl").write_text(json.dumps(line(None, 1.0, source="old")) + "\n")
    assert command.main(arguments) == 1
    assert "no results of the present kernels" in capsys.readouterr().out


def test_stored_tables_are_what_stored_lines_say(tmp_path: Path) -> None:
    assert command.main(["--write-table", "--output", str(tmp_path)]) == 0
    for path in sorted(tmp_path.glob("*.json")):
        assert path.read_text() == (_gemm_tiles.FOLDER / path.name).read_text(), f"{path.name}: run --write-table"


def test_the_part_records_lines_and_what_it_left_out(
    cpu_run: CpuRun, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_product = gemm_tuning.time_product

    def failing(product: Product, *arguments: Any) -> Any:
        if product.kind == "derivative":
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")
        return time_product(product, *arguments)

    monkeypatch.setattr(gemm_tuning, "time_product", failing)
    assert cpu_run.part("gemm") == 0
    is_specialized: list[bool] = []
    monkeypatch.setattr(gemm_tuning, "time_product", lambda *arguments: is_specialized.append(arguments[-1]) or [])
    parts.main(["gemm", "--run", str(cpu_run.file), "--family", "specialized"])
    assert is_specialized == [True] * len(SMALL_PRODUCTS)
    lines = cpu_run.lines("gemm")
    assert len(lines) == 5 * (len(SMALL_PRODUCTS) - 1)
    assert all(line["gpu"] is None for line in lines), "pays nothing that is owed to a GPU"
    (left_out,) = cpu_run.lines("skipped")
    assert (left_out["part"], left_out["reason"]) == ("gemm", "OutOfMemoryError: tried to allocate 80 GiB")
    assert gemm_table.table(lines, _gemm_tiles.source_hash()) is None
