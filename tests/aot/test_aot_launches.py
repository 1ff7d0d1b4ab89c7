"""What the gate compiles: launches as the launchers make them, named once; and what it remembers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.aot import compile as aot_compile
from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.aot.launches import Configuration, capture, configurations
from bert_fast.env import SETTINGS

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(SETTINGS.triton_interpret, reason="the interpreter replaces what is recorded here")

# Triton compiles functions of files only; numbers below stand for pointers, sizes and flags of real kernels.


@triton.jit(do_not_specialize=["n_rows"])
def _scale_kernel(x_ptr, y_ptr, row_stride, n_rows, factor, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * row_stride + tl.arange(0, BLOCK)
    tl.store(y_ptr + offset, tl.load(x_ptr + offset, mask=offset < n_rows) * factor, mask=offset < n_rows)


def launch(block: int = 16, warps: int = 1, rows: int = 16, stride: int = 16, y: torch.Tensor | None = None) -> None:
    x = torch.zeros(64)
    _scale_kernel[(1,)](x, x if y is None else y, stride, rows, 2.0, BLOCK=block, num_warps=warps)


def test_a_launch_is_recorded_as_triton_specializes_it() -> None:
    with capture() as launches:
        launch()
        launch(stride=1, rows=2**40)
    first, second = launches
    assert first.kernel is _scale_kernel
    assert first.signature == {
        "x_ptr": "*fp32", "y_ptr": "*fp32", "row_stride": "i32", "n_rows": "i32", "factor": "fp32",
        "BLOCK": "constexpr",
    }  # fmt: skip
    assert first.constants == {"BLOCK": 16}
    assert first.divisible_by_16 == ("x_ptr", "y_ptr", "row_stride")  # n_rows is never specialized
    assert first.options == {"num_warps": 1} and first.num_warps == 1
    assert second.signature["row_stride"] == "constexpr" and second.constants["row_stride"] == 1
    assert second.signature["n_rows"] == "i64"


def test_a_tensor_descriptor_is_recorded_by_its_tile() -> None:
    """As Triton names it, which knows a descriptor by dtype and tile alone."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    t = torch.zeros(64, 64, dtype=torch.bfloat16)
    with capture() as launches:
        for block in ([16, 32], [16, 64]):
            _scale_kernel[(1,)](TensorDescriptor.from_tensor(t, block), t, 16, 16, 2.0, BLOCK=16)
    first, second = launches
    assert first.signature["x_ptr"] == "tensordesc<bf16[16, 32]>" and "x_ptr" not in first.divisible_by_16
    assert first.identity != second.identity


@pytest.mark.parametrize(
    "change", [{"block": 32}, {"warps": 2}, {"stride": 8}, {"rows": 2**40}, {"y": torch.zeros(64)[1:]}]
)
def test_what_changes_the_code_changes_the_identity(change: dict[str, Any]) -> None:
    with capture() as launches:
        launch()
        launch(rows=17)
        launch(**change)
    base, same, other = (one.identity for one in launches)
    assert base == same  # a size that is never specialized
    assert base != other


def family(*cases: AotCase) -> Any:
    """Stands for a module of benchmarks/families."""

    class Module:
        @staticmethod
        def aot_cases() -> tuple[AotCase, ...]:
            return cases

    return Module


def named(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> list[Configuration]:
    monkeypatch.setattr("benchmarks.aot.launches.importlib.import_module", lambda name: modules[name.rsplit(".", 1)[1]])
    return configurations(modules)


def test_names_are_unique_and_identical_launches_appear_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        launch(block=32)
        launch(block=64)

    facts = KernelFacts(16, 8.0, resident_programs=4, multiply_adds=128, needs_warpgroup_products=True)
    a = family(
        AotCase("H=16", launch, {"_scale_kernel": facts}, has_dropout=False),
        AotCase("H=16", lambda: launch(warps=4), {"_scale_kernel": KernelFacts(16)}, has_dropout=True),
        AotCase("again", launch),
    )
    b = family(AotCase("H=16", lambda: launch(warps=8)), AotCase("pair", twice))
    found = named(monkeypatch, a=a, b=b)
    assert [one.name for one in found] == [
        "scale H=16 plain", "scale H=16 dropout", "scale H=16", "scale pair", "scale pair #2",
    ]  # fmt: skip
    assert [one.family for one in found] == ["a", "a", "b", "b", "b"]
    assert found[0].row_facts(32) == {
        "num_warps": 1, "elements_per_thread": 0.5, "bytes_per_element": 8.0, "resident_threads": 128,
        "multiply_adds_per_element": 128, "needs_warpgroup_products": True, "product_tile": None,
        "needs_bulk_copies": False, "is_specialized": False,
    }  # fmt: skip
    assert found[2].row_facts(64) == {
        "num_warps": 8, "elements_per_thread": None, "bytes_per_element": None, "resident_threads": 512,
        "multiply_adds_per_element": None, "needs_warpgroup_products": False, "product_tile": None,
        "needs_bulk_copies": False, "is_specialized": False,
    }  # fmt: skip


def test_equal_names_of_two_families_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [AotCase("H=16", lambda block=block: launch(block)) for block in (16, 32)]
    found = named(monkeypatch, a=family(cases[0]), b=family(cases[1]))
    assert [one.name for one in found] == ["scale H=16", "scale H=16 (b)"]


def test_every_launch_says_whether_multiplications_and_additions_fuse() -> None:
    """Triton's default changed: without a word, results would differ between its versions."""
    silent = {one.launch.kernel.__name__ for one in configurations() if "enable_fp_fusion" not in one.launch.options}
    assert not silent


def test_what_was_measured_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(aot_compile, "CACHE_DIR", tmp_path)
    compiled: list[Any] = []

    def compile_all(launches: dict[Any, Any]) -> Any:
        compiled.extend(launches)
        return [(job, {"registers": 10, "seconds": 0.5}) for job in launches]

    monkeypatch.setattr(aot_compile, "_compile_all", compile_all)
    [one] = named(monkeypatch, a=family(AotCase("H=16", launch)))
    first = aot_compile.measure({"sm_80": [one], "sm_90": [one]})
    assert list(first) == ["scale H=16 sm_80", "scale H=16 sm_90"] and len(compiled) == 2
    assert aot_compile.measure({"sm_90": [one]})["scale H=16 sm_90"] == first["scale H=16 sm_90"]
    assert len(compiled) == 2
    monkeypatch.setattr(triton, "__version__", "another")
    aot_compile.measure({"sm_90": [one]})
    assert len(compiled) == 3
    assert json.loads((tmp_path / "seconds.json").read_text()) == {"scale H=16 sm_80": 0.5, "scale H=16 sm_90": 0.5}


def test_what_took_long_is_compiled_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(aot_compile, "CACHE_DIR", tmp_path)
    (tmp_path / "seconds.json").write_text(json.dumps({"quick sm_90": 0.1, "slow sm_90": 9.0, "middle sm_90": 1.0}))
    jobs = [("quick", "sm_90"), ("new", "sm_90"), ("slow", "sm_90")]
    assert [name for name, _ in aot_compile._slow_first(jobs)] == ["slow", "new", "quick"]
