"""Kernels as they are compiled for NVIDIA's processors, run by their PTX; bf16, which Triton's interpreter cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase, Problem, Use
from benchmarks.kit.programs import kernel_digests, short
from bert_fast.reference import dropout as reference_dropout
from bert_fast.reference import layer_norm as reference_layer_norm
from bert_fast.reference.layer_norm import LayerNorm
from bert_fast.testing.attention import AttentionCase
from bert_fast.testing.compare import assert_close_to_truth
from tests.kernels.attention_grid import check
from tools import kernel_record
from tools.witness import launch, record
from tools.witness.__main__ import run_case
from tools.witness.launch import witness
from tools.witness.memory import Fault

SEED = torch.tensor([7])


def coords(num_tokens: int) -> Tensor:
    position = torch.arange(num_tokens, dtype=torch.int32)
    return torch.stack([torch.zeros_like(position), position], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden_size", "lead"), [(101, 0), (102, 1), (104, 0)])
def test_rows_of_any_width(dtype: torch.dtype, hidden_size: int, lead: int) -> None:
    """Odd ones are accessed element by element, as are those of tensors that start anywhere."""
    from bert_fast.triton import dropout, layer_norm

    x = torch.randn(9 * hidden_size + lead).to(dtype)[lead:].view(9, hidden_size)
    weight, bias = torch.randn(2, hidden_size).to(dtype).unbind()
    with witness() as found:
        dropped = dropout.dropout_fwd(x, 0.1, SEED, coords(9), 5)
        y, _, _ = layer_norm.layer_norm_fwd(LayerNorm(x, weight, bias, 1e-12))
    assert found.kernels == ["_dropout_kernel", "_layer_norm_fwd_kernel"]
    assert torch.equal(dropped, reference_dropout.dropout_fwd(x, 0.1, SEED, coords(9), 5))
    wide = LayerNorm(x.double(), weight.double(), bias.double(), 1e-12)
    truth, _, _ = reference_layer_norm.layer_norm_fwd(wide)
    plain = torch.nn.functional.layer_norm(x, weight.shape, weight, bias, 1e-12)
    assert_close_to_truth("layer_norm", "y", y, plain, truth)


@pytest.mark.parametrize(
    ("capability", "case"),
    [
        (90, AttentionCase((64, 5), num_heads=1, head_dim=64, dropout_p=0.1)),
        (90, AttentionCase((150, 3), num_heads=1, head_dim=64, dropout_p=0.1)),
        (90, AttentionCase((40, 3), num_heads=1, head_dim=64, relative="C", holes=True)),
        (80, AttentionCase((130,), num_heads=1, head_dim=32, dropout_p=0.1)),
    ],
    ids=["whole heads", "tiles", "relative positions", "sm_80"],
)
def test_attention_in_bf16(capability: int, case: AttentionCase) -> None:
    from bert_fast.triton import attention

    with witness(capability):
        check(attention, case, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_by_the_copy_engine(dtype: torch.dtype) -> None:
    """Sizes that no tile divides: what the copy engine does at the edges."""
    from bert_fast.triton import _gemm

    a, b, bias = torch.randn(72, 200).to(dtype), torch.randn(200, 136).to(dtype), torch.randn(136).to(dtype)
    with witness() as found:
        y, pre = _gemm.product_activation(a, b, bias, "gelu", True)
    assert found.kernels == ["_gemm_kernel"] and pre is not None
    wide = a.double() @ b.double() + bias.double()
    assert_close_to_truth("linear_gelu", "pre", pre, a @ b + bias, wide)
    gelu = torch.nn.functional.gelu
    assert_close_to_truth("linear_gelu", "y", y, gelu(a @ b + bias), gelu(wide))


def test_a_barrier_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from bert_fast.triton import attention

    parse = launch.parse
    monkeypatch.setattr(launch, "parse", lambda text: parse(text.replace("bar.sync \t0;", "", 3)))
    with pytest.raises(Fault, match=r"since the last barrier|between two barriers"), witness():
        check(attention, AttentionCase((64,), num_heads=1, head_dim=64), torch.bfloat16)


def test_a_product_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from bert_fast.triton import attention

    parse = launch.parse

    def without_waits(text: str) -> Any:
        return parse(text.replace("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;", 2))

    monkeypatch.setattr(launch, "parse", without_waits)
    with pytest.raises((Fault, AssertionError)), witness():
        check(attention, AttentionCase((64,), num_heads=1, head_dim=64), torch.bfloat16)


@pytest.mark.parametrize("run", record.RUNS)
def test_every_kernel_was_run_as_it_is_now(run: str) -> None:
    """`make kernels` runs a kernel that was changed since."""
    recorded = kernel_record.read()
    current = record.digests(run, recorded["triton"][record.RUNS[run]])
    assert not kernel_record.stale("witnessed", current), "run make kernels"
    rows = [recorded["witnessed"][key] for key in current]
    assert all(row["cases"] and row["programs"] and (row["share"] or 0.0) <= 1.0 for row in rows)
    everything = {f"{short(name)} {one}" for name in kernel_digests() for one in record.RUNS}
    missing = everything - set(recorded["witnessed"])
    # Those of stored dropout masks are launched on sm_90 alone.
    assert set(recorded["witnessed"]) <= everything and all(key.endswith("_stored sm_80") for key in missing)


def test_a_run_of_what_changed_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_record, "PATH", tmp_path / "kernels.json")
    empty = {"triton": {"newest": "3.9.0", "oldest": "3.6.0"}, "compiled": {}, "rehearsed": {}, "witnessed": {}}
    kernel_record.PATH.write_text(kernel_record._to_json(empty))
    sources = {"_first_kernel": "1", "_second_kernel": "2"}

    def line(case: str, *kernels: str, **changes: Any) -> dict[str, Any]:
        return {"case": f"kernel/{case}", "ok": True, "kernels": kernels, "programs": 7, "share": 0.5} | changes

    monkeypatch.setattr(record, "kernel_digests", lambda: sources)
    monkeypatch.setattr(record, "family_names", lambda: ["a", "b"])
    lines = [line("a", "_first_kernel"), line("b", "_first_kernel", "_second_kernel", share=0.7)]
    record.write("sm_90", "3.9.0", lines, ["a", "b"])
    rows = kernel_record.read()["witnessed"]
    assert [(key, row["cases"], row["programs"], row["share"]) for key, row in rows.items()] == [
        ("first sm_90", 2, 14, 0.7), ("second sm_90", 1, 7, 0.7)
    ]  # fmt: skip
    assert kernel_record.stale("witnessed", record.digests("sm_90", "3.9.0")) == []
    assert len(kernel_record.stale("witnessed", record.digests("sm_90", "4.0.0"))) == 2, "another compiler"
    sources["_second_kernel"] = "2, changed"
    assert kernel_record.stale("witnessed", record.digests("sm_90", "3.9.0")) == ["second sm_90"]
    record.write("sm_90", "3.9.0", [line("b", "_first_kernel", "_second_kernel", ok=False)], ["b"])
    assert kernel_record.read()["witnessed"] == rows, "what is wrong is in no record"
    record.write("sm_90", "3.9.0", [line("b", "_first_kernel", "_second_kernel", programs=8)], ["b"])
    found = kernel_record.read()["witnessed"]
    assert found["first sm_90"] == rows["first sm_90"] and found["second sm_90"]["programs"] == 8
    assert kernel_record.stale("witnessed", record.digests("sm_90", "3.9.0")) == []


def test_the_oldest_triton_has_a_run_of_its_own() -> None:
    oldest = kernel_record.read()["triton"]["oldest"]
    assert record.run_of("sm_90", oldest) == "sm_90 oldest" and record.run_of("sm_90", "99.0") == "sm_90"


def test_families_of_a_changed_kernel_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    version = kernel_record.read()["triton"]["newest"]
    assert record.stale_families("sm_90", version) == []
    monkeypatch.setattr(record, "kernel_digests", lambda: kernel_digests() | {"_layer_norm_fwd_kernel": "another"})
    found = record.stale_families("sm_90", version)
    assert "layer_norm" in found and "dropout" not in found


def test_a_case_that_comes_out_wrong_is_red() -> None:
    """Its comparisons are taken down, and none raises."""

    def verify() -> None:
        one = torch.ones(3)
        assert_close_to_truth("linear", "y", one + 1.0, one, one.double())

    problem = Problem((), None, lambda: None, lambda: None, bytes_moved={}, verify=verify)
    line = run_case(KernelCase("linear", "3", torch.float32, "planted", lambda device: problem, Use.WITNESS), "sm_90")
    assert not line["ok"] and "worst error" in line["error"] and line["share"] > 1.0
