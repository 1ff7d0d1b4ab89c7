"""Steps of fine-tuning and profiles of steps, as `make gpu` takes them, here on the CPU."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the package transformers is not installed")

from benchmarks.gpu import summary
from benchmarks.models import finetuning_steps, flash, step_profiles, training_steps
from benchmarks.models.finetuning_steps import CASES, SMALL_CASES, make_batch
from benchmarks.models.step_profiles import Kernel, account
from tests.benchmarks.conftest import CpuRun, per_text

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it takes to have a result."""
    for module in (training_steps, step_profiles):
        monkeypatch.setattr(module, "STEADY_STEPS", 1)
        monkeypatch.setattr(module, "WARMUP_STEPS", 1, raising=False)
    monkeypatch.setattr(step_profiles, "ROUNDS", 1)
    monkeypatch.setattr(step_profiles, "STEADY_ROUNDS", 1)
    monkeypatch.setattr(step_profiles, "PROFILED_STEPS", 1)


@pytest.mark.usefixtures("flash_on_cpu")
def test_every_contestant_is_timed(cpu_run: CpuRun) -> None:
    """Flattened inputs give what padded ones give, or they would be left out."""
    assert cpu_run.part("finetune") == 0
    left_out = {line["provider"]: line["reason"] for line in cpu_run.lines("skipped")}
    assert set(left_out) == {"fused_graphs"}, left_out
    lines = cpu_run.lines("finetune")
    assert [line["provider"] for line in lines] == ["bert_fast", "fused", "sdpa", "flash"]
    for line in lines:
        assert line["case"] == SMALL_CASES[0].name and 0 < line["ms_p20"] <= line["ms"] <= line["ms_p80"]
        assert line["ms_steady"] > 0 and line["host_ms"] > 0 and line["sequences_per_s"] > 0
        assert "ms_steady" in summary.shown(line)


def test_a_text_that_sees_another_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_text(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *rest: Any) -> Tensor:
        return per_text(q, k, v, cu_seqlens[[0, -1]], *rest)

    monkeypatch.setattr(flash, "flash_varlen", one_text)
    monkeypatch.setattr(finetuning_steps, "PROVIDERS", ("flash",))
    (found,) = finetuning_steps.time_steps(SMALL_CASES[0], CPU, rounds=1, matmul_tflop_s=None)
    assert found["skipped"].startswith("red: logits: ")


def test_the_batch_is_the_same_in_all_forms() -> None:
    for case in (*CASES, *SMALL_CASES):
        batch = make_batch(case, CPU)
        assert batch.padded["input_ids"].shape == (case.batch_size, max(batch.lengths))
        kept = batch.padded["input_ids"][batch.padded["attention_mask"].bool()]
        assert kept.equal(batch.packed["input_ids"])


def test_profiles_are_stored(cpu_run: CpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is on the device; times are the host's."""
    monkeypatch.setattr(finetuning_steps, "PROVIDERS", ("fused", "flash"))  # flash attention is not there on a CPU
    monkeypatch.setattr(step_profiles, "PROVIDERS", ("sdpa",))
    assert cpu_run.part("profile") == 0
    lines = cpu_run.lines("profile")
    texts, words = (case.name for case in step_profiles.SMALL_CASES)
    assert [(line["case"], line["provider"]) for line in lines] == [(texts, "fused"), (words, "sdpa")]
    assert [line["provider"] for line in cpu_run.lines("skipped")] == ["flash"]
    for line in lines:
        assert line["ms"] > 0 and line["ms_steady"] > 0 and line["kernels"] == [] and line["busy_share"] is None
        assert line["case"] in summary.shown(line)


def test_the_account_of_kernels() -> None:
    """Two streams overlap from 4 to 5; the device waits from 2 to 4 and from 7 to 9."""
    name = "void at::native::copy(anonymous)"
    kernels = [Kernel("b", 4, 7), Kernel(name, 0, 2), Kernel(name, 4, 5), Kernel("c", 9, 10)]
    found = account(kernels, 2)
    assert found == {
        "gpu_ms": 0.003, "launches": 2.0, "busy_share": 0.6, "other_kernels": [0, 0.0],
        "kernels": [["copy(anonymous)", 1.5, 1.0], ["b", 1.5, 0.5], ["c", 0.5, 0.5]],
        "gaps": [[2.0, "c"], [2.0, "b"]],
    }  # fmt: skip


def test_a_line_of_a_profile_is_short() -> None:
    kernels = [Kernel(f"kernel<{'x' * 500}, {i % 80}>"[i % 7 :], 2 * i, 2 * i + 1) for i in range(3000)]
    found = account(kernels, 3)
    assert len(found["kernels"]) == step_profiles.MOST_KERNELS and len(found["gaps"]) == step_profiles.MOST_GAPS
    assert found["other_kernels"][0] > 0 and len(json.dumps(found)) < 3500
