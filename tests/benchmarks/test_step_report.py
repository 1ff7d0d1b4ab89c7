"""Steps of fine-tuning and profiles, as pages show them, are of the newest lines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import report, step_report
from benchmarks.kit.markdown import NOTHING

CASE = "finetune/base/full@128/B32"
Store = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Appends a line of a GPU."""

    def append(kind: str, provider: str, run: str = "1", **fields: Any) -> None:
        line = {"gpu": "Some GPU", "kind": kind, "run": run, "case": CASE, "provider": provider}
        with (tmp_path / "some-gpu.jsonl").open("a") as file:
            file.write(json.dumps(line | fields) + "\n")

    return append


def finetune(store: Store, provider: str, ms: float, ms_steady: float, run: str = "1") -> None:
    times = {"ms": ms, "ms_p20": ms - 1, "ms_p80": ms + 1, "ms_steady": ms_steady}
    store("finetune", provider, run, fill=1.0, bert_fast_speedup=ms / 40, **times)


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_without_results_nothing_is_said(tmp_path: Path) -> None:
    assert step_report.render_finetuning(tmp_path) == step_report.render_profiles(tmp_path) == NOTHING


def test_steps_of_fine_tuning_have_a_row_for_each_contestant(store: Store, tmp_path: Path) -> None:
    finetune(store, "sdpa", 99.0, 99.0)
    finetune(store, "fused", 30.0, 50.0, run="2")
    finetune(store, "sdpa", 45.0, 40.0, run="2")
    sdpa, fused = rows(step_report.render_finetuning(tmp_path))
    label = "BERT-base, full@128, 32 texts"
    assert fused == [label, "fused", "30.0", "29.0 to 31.0", "**1.50x**", "50.0", "0.80x"]
    assert sdpa == [label, "sdpa", "45.0", "44.0 to 46.0", "**1.00x**", "40.0", "1.00x"]


def test_no_ratio_is_of_two_runs(store: Store, tmp_path: Path) -> None:
    finetune(store, "sdpa", 45.0, 40.0)
    finetune(store, "fused", 30.0, 20.0, run="2")
    _, fused = rows(step_report.render_finetuning(tmp_path))
    assert (fused[4], fused[6]) == ("", "")


def test_readme_says_both_ways_of_timing(store: Store, tmp_path: Path) -> None:
    for provider, ms, ms_steady in (("fused", 30.0, 50.0), ("fused_graphs", 15.0, 20.0), ("sdpa", 45.0, 40.0)):
        finetune(store, provider, ms, ms_steady)
    assert report.told(tmp_path) == "", "no step of pre-training was timed, which the sentence begins with"
    for provider, speedup in {"bert_fast": 1.0, "fused": 0.8, "fused_graphs": 0.4, "sdpa": 1.2}.items():
        fields = {"ms": 10 * speedup, "host_ms": 5.0, "bert_fast_speedup": speedup, "fill": 1.0}
        store("step", provider, **{"case": "step/base/full@128/B32"} | fields)
    assert report.told(tmp_path).endswith(
        "; fine-tuning on such batches 0.8 to 1.5 times fused, 2.0 to 3.0 with layers as CUDA graphs"
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
    profile = {"gpu_ms": 6.0, "ms_steady": 7.0, "launches": 1234.0, "other_kernels": [3, 150.0]}
    store("profile", "sdpa", kernels=[], **profile)
    store("profile", "sdpa", kernels=kernels, **profile)
    (row,) = rows(step_report.render_profiles(tmp_path))
    assert row[:4] == ["fine-tuning, BERT-base, full@128, 32 texts", "sdpa", "7.0", "6.0"]
    assert row[4:] == ["3.5", "0.7", "0.3", "0.9", "0.1", "0.2", "0.1", "1,234"]


def test_a_group_without_a_named_kernel_is_left_empty(store: Store, tmp_path: Path) -> None:
    store("profile", "sdpa", kernels=[["_gemm_kernel", 2000.0, 24]], other_kernels=[1, 9.0], gpu_ms=2.0, ms_steady=3.0,
          launches=25.0)  # fmt: skip
    (row,) = rows(step_report.render_profiles(tmp_path))
    assert row[4:] == ["2.0", "", "", "", "", "", "0.0", "25"]
