"""What pages show of GPUs is of the newest lines, and no ratio is of two runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import report, step_report
from benchmarks.kit.markdown import NOTHING
from benchmarks.kit.programs import kernel_digests

GPU = {"gpu": "Some GPU", "torch": "2.11", "triton": "3.6", "driver": "1.2", "time": "2026-01-01T00:00:00+00:00"}
CASE = "step/base/full@128/B256"
FINETUNE = "finetune/base/full@128/B32"
Store = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Appends a line of the GPU."""

    def append(kind: str, run: str = "1", **fields: Any) -> None:
        with (tmp_path / "some-gpu.jsonl").open("a") as file:
            file.write(json.dumps(GPU | {"kind": kind, "run": run} | fields) + "\n")

    return append


def step(store: Store, provider: str, speedup: float, run: str = "1", **fields: Any) -> None:
    """A step that takes 10 ms times the speed-up of ours."""
    times = {"ms": 10.0 * speedup, "host_ms": 5.0, "sequences_per_s": 1000.4, "mfu": 0.5, "peak_bytes": 2**31}
    shared = {"case": CASE, "provider": provider, "fill": 1.0, "bert_fast_speedup": speedup, **times}
    store("step", run, **shared | fields)


def timing(store: Store, provider: str, mode: str, us: float, run: str = "1", **fields: Any) -> None:
    """A kernel's time."""
    case = fields.pop("case", "kernel/layer_norm/16384x768/bf16/affine")
    kernels = {"kernels": kernel_digests()} if provider == "bert_fast" else {}
    store("timing", run, family=case.split("/")[1], case=case, provider=provider, mode=mode, us=us, **kernels | fields)


def cells(text: str, row: int = 0) -> list[dict[str, str]]:
    """The row of that number of each table, by the heads of columns."""
    found = []
    for part in text.split("\n\n"):
        if part.startswith("|"):
            head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines())
            found.append(dict(zip(head, rows[row], strict=True)))
    return found


def test_without_results_nothing_is_said(tmp_path: Path) -> None:
    assert report.front_rows(tmp_path) == [] and not report.picture(tmp_path).groups
    for render in (report.render_steps, report.render_kernels, report.render_checked):
        assert render(tmp_path) == NOTHING
    assert step_report.render_finetuning(tmp_path) == step_report.render_profiles(tmp_path) == NOTHING


def test_steps_are_of_the_newest_lines(store: Store, tmp_path: Path) -> None:
    step(store, "bert_fast", 1.0)
    step(store, "sdpa", 9.0)
    for provider, speedup in {"bert_fast": 1.0, "fused": 1.25, "sdpa": 2.0, "eager": 3.0, "graph": 0.8}.items():
        step(store, provider, speedup, run="2")
    times, rates = cells(report.render_steps(tmp_path))
    assert times["ms (host), step"] == "BERT-base, full@128, 256 texts"
    assert times["sdpa"] == "20.0 (5.0)" and times["bert_fast over sdpa"] == "**2.00x**"
    assert times["bert_fast over eager"] == "3.00x" and times["fused over sdpa"] == "**1.60x**"
    assert times["graph over bert_fast"] == "1.25x", "a graph that takes 0.8 of the time is 1.25 times as fast"
    assert "compiled" not in times
    assert rates["bert_fast, sequences/s (MFU)"] == "1,000 (50%)" and rates["eager, GiB"] == "2.0"


def test_no_ratio_is_of_two_runs(store: Store, tmp_path: Path) -> None:
    step(store, "sdpa", 2.0)
    step(store, "fused", 1.5)
    step(store, "bert_fast", 1.0, run="2")
    (steps,) = report.steps_by_gpu(tmp_path).values()
    assert steps[0].faster("bert_fast", "sdpa") is None and steps[0].faster("fused", "sdpa") == pytest.approx(4 / 3)
    times, _ = cells(report.render_steps(tmp_path))
    assert times["bert_fast over sdpa"] == ""
    assert report.front_rows(tmp_path) == []


def test_readme_has_a_row_for_each_large_step(store: Store, tmp_path: Path) -> None:
    for case in ("step/large/even@512/B64", "step/large/full@512/B32", CASE):
        for provider, speedup in {"bert_fast": 1.0, "fused": 1.25, "sdpa": 3.0 if "even" in case else 2.0}.items():
            step(store, provider, speedup, case=case)
    assert report.front_rows(tmp_path) == [
        ("Some GPU, bf16", f"pre-training, {what}", f"**{fused}x**", f"**{own}x**", "2.0 / 2.0 / 2.0 GiB")
        for what, fused, own in (
            ("BERT-base, 128 tokens", "1.6", "2.0"), ("BERT-large, 512 tokens", "1.6", "2.0"),
            ("BERT-large, up to 512 tokens", "2.4", "3.0"),
        )
    ]  # fmt: skip
    own, fused = report.picture(tmp_path).groups
    assert [bar.ratio for bar in own.bars] == [2.0, 2.0, 3.0]
    assert [bar.ratio for bar in fused.bars] == pytest.approx([1.6, 1.6, 2.4])


def test_small_batches_are_told_by_what_graphs_gain(store: Store, tmp_path: Path) -> None:
    for provider, speedup in {"bert_fast": 1.0, "fused": 0.8, "fused_graphs": 0.4, "sdpa": 1.2}.items():
        step(store, provider, speedup, case="step/base/full@128/B32")
    assert [row[1:3] for row in report.front_rows(tmp_path)] == [
        ("pre-training, at most 8,192 tokens a batch", "**1.5x**, with [CUDA graphs](docs/migration.md) **3.0x**")
    ]
    (group,) = report.picture(tmp_path).groups
    assert "graphs" in group.title and [bar.ratio for bar in group.bars] == pytest.approx([3.0])
    times, _ = cells(report.render_steps(tmp_path))
    assert times["fused_graphs over sdpa"] == "**3.00x**"


def test_other_families_have_a_table_of_their_own(store: Store, tmp_path: Path) -> None:
    case = "step/XLMRoberta/base/squad_windows_512_stride128@362/B16"
    for provider, speedup in {"labelled": 1.0, "fused": 2.0, "sdpa": 4.0}.items():
        step(store, provider, speedup, case=case, fill=0.5)
    (times,) = cells(report.render_steps(tmp_path))
    assert times["ms (host), step"].startswith("XLM-RoBERTa base, squad") and times["fused over sdpa"] == "**2.00x**"
    assert times["labelled over sdpa"] == "**4.00x**" and times["fill"] == "0.50"
    assert report.front_rows(tmp_path) == [], "no class of the library's own took part"


def test_a_name_of_no_step_is_an_error(store: Store, tmp_path: Path) -> None:
    step(store, "bert_fast", 1.0, case="step/base")
    with pytest.raises(ValueError, match=r"^case: expected the name of a training step, got 'step/base'$"):
        report.render_steps(tmp_path)


def test_kernels_have_the_share_that_binds_and_ratios_of_their_own_run(store: Store, tmp_path: Path) -> None:
    timing(store, "bert_fast", "fwd", 9.0, share_of_copy_ceiling=0.5)
    timing(store, "eager", "fwd", 90.0, bert_fast_speedup=10.0)
    timing(store, "bert_fast", "fwd", 5.0, run="2", share_of_copy_ceiling=0.6, share_of_matmul_ceiling=0.7)
    timing(store, "bert_fast", "bwd", 6.0, run="2", share_of_copy_ceiling=0.8)
    timing(store, "eager", "bwd", 3.0, run="2", bert_fast_speedup=0.5)
    (shown,) = report.render_kernels(tmp_path).split("\n\n")[1:]
    assert (
        shown.splitlines()[2] == "| layer_norm 16384x768, bf16, affine | 5.0 | 70% matmul |  | 6.0 | 80% copy | 0.50x |"
    )


def test_a_kernel_whose_source_was_another_is_marked(store: Store, tmp_path: Path) -> None:
    timing(store, "bert_fast", "fwd", 9.0, kernels=kernel_digests() | {"_dropout_kernel": "another"})
    timing(store, "bert_fast", "step", 9.0, case="kernel/optimizer/bert-base/fp32/adamw", kernels={"gone": "1"})
    names = [
        name for row in cells(report.render_kernels(tmp_path)) for name in row.values() if "fp" in name or "bf" in name
    ]
    assert len(names) == 2 and all(name.endswith(" (before)") for name in names)


def test_kernels_of_other_sizes_and_red_cases_are_not_shown(store: Store, tmp_path: Path) -> None:
    timing(store, "bert_fast", "fwd", 5.0, share_of_copy_ceiling=0.6, case="kernel/layer_norm/4096x768/bf16/affine")
    assert report.render_kernels(tmp_path) == NOTHING
    timing(store, "bert_fast", "fwd", 5.0, share_of_copy_ceiling=0.6)
    assert "16384x768" in report.render_kernels(tmp_path)
    store(
        "verify", family="layer_norm", case="kernel/layer_norm/16384x768/bf16/affine", ok=False, error="x", kernels={}
    )
    assert report.render_kernels(tmp_path) == NOTHING


def test_what_is_one_launch_has_a_table_of_its_own(store: Store, tmp_path: Path) -> None:
    timing(store, "bert_fast", "step", 5.0, share_of_copy_ceiling=0.9, case="kernel/optimizer/bert-base/fp32/adamw")
    timing(store, "compiled", "step", 6.0, bert_fast_speedup=1.2, case="kernel/optimizer/bert-base/fp32/adamw")
    (row,) = cells(report.render_kernels(tmp_path))
    assert row == {
        "operation, case, all of it": "optimizer bert-base, fp32, adamw", "us": "5.0", "of the ceiling": "90% copy",
        "over compiled": "1.20x",
    }  # fmt: skip


def test_what_was_checked_is_counted_by_its_newest_line_and_red_is_named(store: Store, tmp_path: Path) -> None:
    store("verify", case="kernel/a", ok=False, kernels={"_a_kernel": "1"})
    store("verify", case="kernel/a", ok=True, kernels={"_a_kernel": "2"})
    store("verify", case="kernel/b", ok=False, kernels={"_a_kernel": "2", "_b_kernel": "2"})
    store("smoke", case="whole/graph", outcome="green")
    this = f"tests/benchmarks/{Path(__file__).name}::test_without_results_nothing_is_said"
    for name, outcome in {f"{this}[x]": "passed", f"{this}[y-::]": "failed", f"{this}[z]": "skipped"}.items():
        store("test", test=name, outcome=outcome)
    store("test", test=f"{this}_any_more", outcome="failed")
    store("test", test="tests/no_such_file.py::test_x", outcome="failed")
    store("part", part="tests", outcome="killed")
    for tool, outcome in (("memcheck", "failed"), ("memcheck", "passed"), ("racecheck", "skipped")):
        store("sanitizer", tool=tool, outcome=outcome, kernels=["_a_kernel", "_b_kernel"])
    assert report.render_checked(tmp_path) == (
        "- **Some GPU** (torch 2.11, triton 3.6, driver 1.2): 1 of 2 cases of `verify`, which launch 2 kernels, gave "
        "the same bits twice and agree with fp64 (red: `kernel/b`); 1 of 1 cases of `make gpu-smoke` are green; 1 of 2 "
        f"GPU tests that ran before their time was up passed (failed: `{this}[y-::]`); "
        "memcheck passed over 2 kernels."
    )


def finetune(store: Store, provider: str, ms: float, ms_steady: float, run: str = "1") -> None:
    times = {"ms": ms, "ms_p20": ms - 1, "ms_p80": ms + 1, "ms_steady": ms_steady}
    shared = {"case": FINETUNE, "provider": provider, "fill": 1.0, "bert_fast_speedup": ms / 40}
    store("finetune", run, **shared, **times)


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_steps_of_fine_tuning_have_a_row_for_each_contestant(store: Store, tmp_path: Path) -> None:
    finetune(store, "sdpa", 99.0, 99.0)
    finetune(store, "fused", 30.0, 50.0, run="2")
    finetune(store, "sdpa", 45.0, 40.0, run="2")
    sdpa, fused = rows(step_report.render_finetuning(tmp_path))
    label = "BERT-base, full@128, 32 texts"
    assert fused == [label, "fused", "30.0", "29.0 to 31.0", "**1.50x**", "50.0", "0.80x"]
    assert sdpa == [label, "sdpa", "45.0", "44.0 to 46.0", "**1.00x**", "40.0", "1.00x"]


def test_no_ratio_of_fine_tuning_is_of_two_runs(store: Store, tmp_path: Path) -> None:
    finetune(store, "sdpa", 45.0, 40.0)
    finetune(store, "fused", 30.0, 20.0, run="2")
    _, fused = rows(step_report.render_finetuning(tmp_path))
    assert (fused[4], fused[6]) == ("", "")


def test_readme_says_both_ways_of_timing(store: Store, tmp_path: Path) -> None:
    for provider, ms, ms_steady in (("fused", 30.0, 50.0), ("fused_graphs", 15.0, 20.0), ("sdpa", 45.0, 40.0)):
        finetune(store, provider, ms, ms_steady)
    assert report.front_rows(tmp_path) == [], "no step of pre-training was timed"
    for provider, speedup in {"bert_fast": 1.0, "fused": 0.8, "fused_graphs": 0.4, "sdpa": 1.2}.items():
        step(store, provider, speedup, case="step/base/full@128/B32")
    assert report.front_rows(tmp_path)[-1][1:3] == (
        "fine-tuning, at most 8,192 tokens a batch",
        "**0.8 to 1.5x**, with [CUDA graphs](docs/migration.md) **2.0 to 3.0x**",
    )


def test_a_profile_is_summed_up_by_what_kernels_do(store: Store, tmp_path: Path) -> None:
    kernels = [
        ["_gemm_kernel", 2000.0, 24], ["nvjet_sm90_tst", 1000.0, 24],
        ["cutlass::Kernel2<cutlass_80_s16816gemm", 500.0, 1],
        ["_attention_fwd_kernel", 400.0, 12], ["cudnn_generated_fort_native_sdpa_sm90", 300.0, 12],
        ["_dropout_add_layer_norm_fwd_kernel", 200.0, 24], ["GammaBetaBackwardCUDAKernel", 100.0, 24],
        ["multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdam", 900.0, 7],
        ["Memcpy DtoD (Device -> Device)", 100.0, 5],
        ["vectorized_elementwise_kernel<8, bfloat16_copy_kernel", 20.0, 5], ["reduce_kernel<128, 4", 240.0, 7],
    ]  # fmt: skip
    profile = {
        "case": FINETUNE,
        "provider": "sdpa",
        "gpu_ms": 6.0,
        "ms_steady": 7.0,
        "launches": 1234.0,
        "other_kernels": [3, 150.0],
    }
    store("profile", kernels=[], **profile)
    store("profile", kernels=kernels, **profile)
    (row,) = rows(step_report.render_profiles(tmp_path))
    assert row[:4] == ["fine-tuning, BERT-base, full@128, 32 texts", "sdpa", "7.0", "6.0"]
    assert row[4:] == ["3.5", "0.7", "0.3", "0.9", "0.1", "0.2", "0.1", "1,234"]


def test_a_group_without_a_named_kernel_is_left_empty(store: Store, tmp_path: Path) -> None:
    profile = {"case": FINETUNE, "provider": "sdpa", "gpu_ms": 2.0, "ms_steady": 3.0, "launches": 25.0}
    store("profile", kernels=[["_gemm_kernel", 2000.0, 24]], other_kernels=[1, 9.0], **profile)
    (row,) = rows(step_report.render_profiles(tmp_path))
    assert row[4:] == ["2.0", "", "", "", "", "", "0.0", "25"]
