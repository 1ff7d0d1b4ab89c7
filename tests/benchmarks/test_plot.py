"""Pictures of stored results: what is drawn, what is not, and a page that needs nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.results import RESULTS
from benchmarks.plot import __main__ as plot
from benchmarks.plot.stored import load
from benchmarks.registry import CASES, FAMILY_CASES, FUSED_CASES
from tests.benchmarks.conftest import CpuRun


def timing(provider: str, case: str = "kernel/x/8x16/bf16/p0.1", mode: str = "fwd", **changes: Any) -> dict[str, Any]:
    line = {
        "kind": "timing", "gpu": "Made up", "run": "2", "processor": "none", "torch": "0.1", "commit": "c0ffee" * 6,
        "dirty": False, "time": "2000-01-01T00:00:00+00:00", "family": "x", "case": case, "mode": mode,
        "provider": provider, "us": 10.0, "us_p20": 9.0, "us_p80": 11.0, "host_us": 5.0, "bytes": 1, "gb_s": 1.0,
        "equal_copy_gb_s": 2.0, "share_of_equal_copy": 0.5, "copy_ceiling_gb_s": 4.0, "share_of_copy_ceiling": 0.25,
    }  # fmt: skip
    return line | ({} if provider == "bert_fast" else {"bert_fast_speedup": 2.0}) | changes


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    (folder / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_newest_result_of_each_case_is_drawn(tmp_path: Path) -> None:
    old = timing("bert_fast", us=99.0, run="1", commit="bad" * 13)
    stale = timing("compiled", run="1")  # beside the old kernel
    folder = write(tmp_path, old, stale, timing("bert_fast"), timing("eager"), timing("liger", bert_fast_speedup=0.5))
    (machine,) = load(folder)
    (row,) = machine.rows
    assert (row.family, row.label, row.mode) == ("x", "8x16  bf16  p0.1", "fwd")
    assert row.result["us"] == 10.0
    assert row.share == 0.25
    assert row.speedups == {"eager": 2.0, "liger": 0.5}


def test_ceilings_are_those_of_the_newest_run_that_measured_them(tmp_path: Path) -> None:
    ceilings = [{**timing("copy", run=run), "kind": "ceiling", "gb_s": float(run)} for run in "12"]
    (machine,) = load(write(tmp_path, *ceilings, timing("bert_fast", run="3")))
    assert machine.ceilings == ceilings[1:] and machine.sanitizer == []


def test_whole_models_come_as_the_registry_has_them(tmp_path: Path) -> None:
    """However the file has them, which says when each was measured last; what the registry has not comes last."""
    cases = [case.name for case in (*CASES[:3], *FUSED_CASES[:2], *FAMILY_CASES[:2])]
    lines = [timing("bert_fast", case, kind="cpu", gpu=None, threads=2) for case in ("x", *reversed(cases))]
    (machine,) = load(write(tmp_path, *lines))
    assert list(machine.simple) == [*cases, "x"]


def test_arithmetic_binds_where_operations_are_counted(tmp_path: Path) -> None:
    (machine,) = load(write(tmp_path, timing("bert_fast", share_of_matmul_ceiling=0.75)))
    assert machine.rows[0].share == 0.75


def test_a_case_that_turned_red_is_named_and_not_drawn(tmp_path: Path) -> None:
    red = {**timing("bert_fast"), "kind": "verify", "ok": False, "error": "wrong: dx"}
    folder = write(tmp_path, timing("bert_fast"), timing("eager"), red)
    (machine,) = load(folder)
    assert machine.rows == []
    page = plot.draw(folder, tmp_path / "out").read_text()
    assert "is wrong and was not timed: wrong: dx" in page
    assert "<svg" not in page


def test_the_page_stands_alone(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        {**timing("copy"), "kind": "ceiling", "what": "copy", "bytes": 1e8, "gb_s": 4000.0, "case": None},
        timing("bert_fast"), timing("eager"), timing("bert_fast", mode="bwd", dirty=True), timing("<peer>"),
    )  # fmt: skip
    text = plot.draw(folder, tmp_path / "out").read_text()
    assert text.count("<svg") == 1 and "times as fast as &lt;peer&gt;: 8x16  bf16  p0.1  fwd 2.0x" in text
    assert not re.search(r'(?:src|href)="', text), "nothing is loaded from elsewhere"
    for shown in ("Made up", "c0ffeec (changed)", "2000-01-01", "4,000 GB/s", "2.00x", "&lt;peer&gt;"):
        assert shown in text


def product(run: str, tile: dict[str, int] | None, speedup: float = 1.0) -> dict[str, Any]:
    line = {"kind": "gemm", "product": "activation", "layout": "nt", "what": "base up", "m": 1, "n": 2, "k": 3}
    line |= {"us": 9.0, "tile": tile, "candidate": str(tile), "speedup_over_library": speedup, "source": run}
    return {**timing("none"), **line, "run": run, "verified": tile is not None}


def test_matrix_products_are_drawn_from_their_newest_lines(tmp_path: Path) -> None:
    failed = {name: value for name, value in product("2", {"a": 1}).items() if name != "us"} | {"error": "wrong"}
    lines = [product("1", None), product("1", {}, 7.0), product("2", None), failed, product("2", {}, 1.25)]
    folder = write(tmp_path, *lines)
    (machine,) = load(folder)
    found = machine.products["base up  activation nt  1x2x3"]
    assert [(line["run"], line["speedup_over_library"]) for line in found] == [("2", 1.0), ("2", 1.25)]
    page = plot.draw(folder, tmp_path / "out").read_text()
    assert "matrix products. times as fast as the library with separate kernels: base up" in page
    assert '<td class="number">1.25x</td><td>{}</td>' in page
    alone = plot.draw(write(tmp_path, product("1", None)), tmp_path / "out").read_text()
    assert "<svg" not in alone and '<td class="number">9.0</td>' in alone, "the library alone"


def test_times_without_a_ceiling_can_be_drawn(tmp_path: Path) -> None:
    line = timing("bert_fast", gpu=None, threads=2, share_of_copy_ceiling=None, copy_ceiling_gb_s=None)
    page = plot.draw(write(tmp_path, line, {**line, "provider": "eager", "bert_fast_speedup": 3.0}), tmp_path / "out")
    text = page.read_text()
    assert "none, 2 threads" in text and "3.00x" in text and "<svg" in text


def test_stored_cpu_results_can_be_drawn(tmp_path: Path) -> None:
    text = plot.draw(RESULTS, tmp_path).read_text()
    assert "minilm/full@128/random/training" in text and text.count("<svg") >= 2


def test_results_of_a_real_run_can_be_drawn(cpu_run: CpuRun, tmp_path: Path) -> None:
    for part in ("ceilings", "verify", "time"):
        cpu_run.part(part)
    # What a run on a CPU for a test says of its machine is no more than this.
    lines = [json.loads(line) | {"gpu": "none"} for line in cpu_run.results.read_text().splitlines()]
    cpu_run.results.unlink()
    folder = write(tmp_path, *lines)
    page = plot.draw(folder, tmp_path / "out").read_text()
    assert "8x16  fp32  right" in page and "wrong: worst error 1.0" in page


def test_a_folder_without_results_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plot.main(["--results", str(tmp_path)])
    assert "no results" in capsys.readouterr().err
