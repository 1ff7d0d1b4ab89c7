"""`make gpu-status`: which kernels are owed a GPU result, and silence when none is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import status as gpu_status
from benchmarks.kit import programs
from benchmarks.kit.results import ROOT

FAMILY = """
import triton
from bert_fast.triton._sums import sums
from bert_fast.triton._math import helper

@triton.jit
def _helper(x):
    return x

@triton.jit
def _x_fwd_kernel(x_ptr):
    helper()

@triton.jit(do_not_specialize=["n"])
def _x_bwd_kernel(x_ptr, n):
    pass

def x_fwd(x):
    pass
"""
SUMS = """
import triton

@triton.jit
def _sums_kernel(x_ptr):
    pass
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    kernels, results = tmp_path / "kernels", tmp_path / "results"
    kernels.mkdir()
    results.mkdir()
    (kernels / "__init__.py").write_text("")
    (kernels / "_math.py").write_text("def helper(): pass\n")
    (kernels / "_sums.py").write_text(SUMS)
    (kernels / "_unused.py").write_text("")
    (kernels / "x.py").write_text(FAMILY)
    monkeypatch.setattr(programs, "KERNELS", kernels)
    monkeypatch.setattr(gpu_status, "RESULTS", results)
    return kernels, results


def write(results: Path, *kernels: str, **changes: Any) -> None:
    line = {"kind": "timing", "provider": "bert_fast", "gpu": "NVIDIA H200", "verified": True}
    digests = programs.kernel_digests()
    line |= {"kernels": {kernel: digests[kernel] for kernel in kernels or digests}} | changes
    with open(results / "gpu.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n\n")


def owed() -> list[str]:
    return [kernel for _, kernel, _ in gpu_status.owed()]


def test_kernels_without_a_result_are_owed(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_status.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: {kernel} ({programs.digest(file, kernel)})"
        for file, kernel in (("_sums", "_sums_kernel"), ("x", "_x_fwd_kernel"), ("x", "_x_bwd_kernel"))
    ]


def test_nothing_is_printed_when_none_is_owed(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    write(folders[1])
    assert gpu_status.main([]) == 0
    assert capsys.readouterr().out == ""
    assert gpu_status.main(["--results", str(folders[0])]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3, "another folder holds other results"


def test_a_result_counts_for_what_it_launched(folders: tuple[Path, Path]) -> None:
    write(folders[1], "_x_fwd_kernel")
    assert owed() == ["_sums_kernel", "_x_bwd_kernel"]
    write(folders[1], "_x_bwd_kernel", "_sums_kernel")
    assert owed() == []


def test_a_result_counts_until_the_kernel_changes(folders: tuple[Path, Path]) -> None:
    kernels, results = folders
    write(results)
    (kernels / "_math.py").write_text("def helper(): return 1\n")
    assert owed() == ["_x_fwd_kernel"], "the one that calls it"
    (kernels / "_sums.py").write_text(SUMS.replace("pass", "return"))
    assert owed() == ["_sums_kernel", "_x_fwd_kernel"]


def test_a_tile_of_a_matrix_product_counts_as_a_case(folders: tuple[Path, Path]) -> None:
    write(folders[1], "_x_fwd_kernel", kind="gemm", provider=None)
    assert owed() == ["_sums_kernel", "_x_bwd_kernel"]
    write(folders[1], "_x_bwd_kernel", kind="gemm", provider=None, verified=None)
    assert owed() == ["_sums_kernel", "_x_bwd_kernel"], "the library's line has launched none of ours"


@pytest.mark.parametrize(
    "changes", [{"gpu": None}, {"verified": False}, {"verified": None}, {"kind": "verify"}, {"provider": "eager"}]
)
def test_what_does_not_count(changes: dict[str, Any], folders: tuple[Path, Path]) -> None:
    write(folders[1], **changes)
    assert len(owed()) == 3


def test_a_broken_results_file_is_named(folders: tuple[Path, Path]) -> None:
    (folders[1] / "broken.jsonl").write_text('{"a": 1}\n{"a"\n')
    with pytest.raises(SystemExit, match=r"broken\.jsonl, line 2"):
        gpu_status.owed()


def test_the_real_kernels_are_found_without_torch_or_triton() -> None:
    code = (
        "import sys; from benchmarks.gpu import status; from benchmarks.kit import programs; status.main([]);"
        "print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)), sorted(programs.kernel_digests()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("[] ")
    for kernel in ("_column_sums_kernel", "_dropout_add_layer_norm_fwd_kernel", "_gemm_kernel", "_gemm_reduce_kernel"):
        assert repr(kernel) in last
