"""`make gpu-status`: which kernels are owed a GPU result."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_status

FAMILY = """
import triton
from bert_fast.kernels._math import helper

@triton.jit
def _helper(x):
    return x

@triton.jit
def _x_fwd_kernel(x_ptr):
    pass

@triton.jit(do_not_specialize=["n"])
def _x_bwd_kernel(x_ptr, n):
    pass

def x_fwd(x):
    pass
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    kernels, results = tmp_path / "kernels", tmp_path / "results"
    kernels.mkdir()
    results.mkdir()
    (kernels / "__init__.py").write_text("")
    (kernels / "_math.py").write_text("def helper(): pass\n")
    (kernels / "_unused.py").write_text("")
    (kernels / "x.py").write_text(FAMILY)
    monkeypatch.setattr(gpu_status, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_status, "KERNELS", kernels)
    monkeypatch.setattr(gpu_status, "RESULTS", results)
    return kernels, results


def test_kernels_without_a_result_are_owed(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    current = gpu_status.source_hash("x")
    assert gpu_status.owed() == [("x", "_x_fwd_kernel", current), ("x", "_x_bwd_kernel", current)]
    assert gpu_status.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith("0 of 2")


def test_a_result_counts_until_the_source_changes(folders: tuple[Path, Path]) -> None:
    kernels, results = folders
    line = {"source_hash": gpu_status.source_hash("x"), "gpu": "NVIDIA H200"}
    (results / "gpu.jsonl").write_text(json.dumps(line) + "\n\n")
    assert gpu_status.owed() == []
    (kernels / "_unused.py").write_text("# no kernel of x imports this file\n")
    assert gpu_status.owed() == []
    (kernels / "_math.py").write_text("def helper(): return 1\n")
    assert len(gpu_status.owed()) == 2


def test_a_result_from_a_cpu_does_not_count(folders: tuple[Path, Path]) -> None:
    _, results = folders
    (results / "cpu.jsonl").write_text(json.dumps({"source_hash": gpu_status.source_hash("x"), "gpu": None}) + "\n")
    assert len(gpu_status.owed()) == 2


def test_a_broken_results_file_is_named(folders: tuple[Path, Path]) -> None:
    (folders[1] / "broken.jsonl").write_text('{"a": 1}\n{"a"\n')
    with pytest.raises(SystemExit, match=r"broken\.jsonl, line 2"):
        gpu_status.owed()
