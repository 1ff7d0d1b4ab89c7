"""Kernels as they are compiled for NVIDIA's processors, run by their PTX; bf16, which Triton's interpreter cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase, Problem, Use
from benchmarks.kit.programs import kernel_digests
from bert_fast.reference import dropout as reference_dropout
from bert_fast.reference import layer_norm as reference_layer_norm
from bert_fast.reference.layer_norm import LayerNorm
from bert_fast.testing.attention import AttentionCase
from bert_fast.testing.compare import assert_close_to_truth
from tests.kernels.attention_grid import check
from tools.witness import launch, record
from tools.witness.__main__ import DEVICES, run_case
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
        (90, AttentionCase((40, 3), num_heads=1, head_dim=64, relative="relative_key", holes=True)),
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


@pytest.mark.parametrize("name", [*DEVICES, "sm_90 oldest"])
def test_every_kernel_was_run_as_it_is_now(name: str) -> None:
    """`make witness` writes the record; a kernel that was changed since has to be run again."""
    assert record.read()[name]["kernels"] == dict(sorted(kernel_digests().items()))


def test_a_run_of_what_changed_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RECORD_PATH", tmp_path / "record.json")
    sources = {"first_kernel": "1", "second_kernel": "2", "third_kernel": "3"}

    def line(case: str, *kernels: str, **changes: Any) -> dict[str, Any]:
        found = {"programs": 7, "output": "y", "worst": 0.1, "rms": 0.1, "share": 0.5, "seconds": 1.0}
        found |= {"case": f"kernel/{case}", "ok": True, "kernels": {one: sources[one] for one in kernels}}
        return found | changes

    monkeypatch.setattr(record, "kernel_digests", lambda: sources)
    assert record.up_to_date("sm_90", "3.9.0") == set()
    lines = [line("a", "first_kernel"), line("b", "first_kernel", "second_kernel"), line("c", "third_kernel")]
    record.write("sm_90", "3.9.0", lines)
    assert record.up_to_date("sm_90", "3.9.0") == {"kernel/a", "kernel/b", "kernel/c"}
    assert record.up_to_date("sm_90", "4.0.0") == record.up_to_date("sm_80", "3.9.0") == set()
    sources["second_kernel"] = "2, changed"
    known = record.up_to_date("sm_90", "3.9.0")
    assert known == {"kernel/a", "kernel/c"}
    record.write("sm_90", "3.9.0", [line("b", "first_kernel", "second_kernel", programs=8)], known)
    found = record.read()["sm_90"]
    assert found["kernels"] == sources and list(found["cases"]) == ["a", "b", "c"]
    assert [case["programs"] for case in found["cases"].values()] == [7, 8, 7]
    record.write("sm_90", "3.9.0", [line("b", "first_kernel", "second_kernel", ok=False)], known)
    assert list(record.read()["sm_90"]["cases"]) == ["a", "c"], "what is wrong is in no record"


def test_markdown_has_every_case_and_kernel() -> None:
    runs = record.read()
    rows = [line.split(" | ")[0][2:] for line in record.markdown(runs).splitlines() if line.startswith("| ")]
    cases = [["case", "---", *run["cases"]] for run in runs.values()]
    kernels = sorted({f"`{kernel}`" for run in runs.values() for kernel in run["kernels"]})
    assert rows == [*(row for table in cases for row in table), "kernel", "---", *kernels]
    assert all(0.0 <= (case["share"] or 0.0) <= 1.0 for run in runs.values() for case in run["cases"].values())


def test_a_case_that_comes_out_wrong_is_red() -> None:
    """Its comparisons are taken down, and none raises."""

    def verify() -> None:
        one = torch.ones(3)
        assert_close_to_truth("linear", "y", one + 1.0, one, one.double())

    problem = Problem((), None, lambda: None, lambda: None, bytes_moved={}, verify=verify)
    line = run_case(KernelCase("linear", "3", torch.float32, "planted", lambda device: problem, Use.WITNESS), "sm_90")
    assert not line["ok"] and "worst error" in line["error"] and line["share"] > 1.0
