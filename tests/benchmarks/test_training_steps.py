"""Whole training steps as `make gpu` times them, here on the CPU: right ones only, each contestant, operations."""

import pytest
import torch

from benchmarks.models import training_steps
from benchmarks.models.training_steps import SMALL_CASES, StepCase, make_batch, model_flops
from tests.benchmarks.conftest import CpuRun

FIELDS = {
    "case", "provider", "fill", "ms", "ms_p20", "ms_p80", "sequences_per_s", "real_tokens_per_s", "model_tflop_s",
    "mfu", "matmul_ceiling_tflop_s", "peak_bytes", "bert_fast_speedup", "rounds",
}  # fmt: skip


def test_every_contestant_is_timed(cpu_run: CpuRun) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    assert cpu_run.part("steps") == 0
    lines = cpu_run.lines("step")
    assert not cpu_run.lines("skipped")
    assert [line["provider"] for line in lines] == list(training_steps.PROVIDERS)
    for line in lines:
        assert set(line) >= FIELDS
        assert line["real_tokens_per_s"] > 0 and 0 < line["ms_p20"] <= line["ms"] <= line["ms_p80"]


@pytest.mark.slow
def test_the_compiled_model_is_timed_beside_ours() -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    case, device = SMALL_CASES[0], torch.device("cpu")
    training_steps.compile_step(case, device, "aot_eager")
    results = training_steps.time_steps(
        case, device, rounds=1, matmul_tflop_s=1e-6, compile_backend="aot_eager", is_compiled=True
    )
    found = {result["provider"]: result for result in results}
    assert list(found) == list(training_steps.COMPILED_PROVIDERS)
    assert all(result["mfu"] > 0 for result in found.values())
    assert sorted(found, key=lambda name: found[name]["ms"]) == sorted(found, key=lambda name: -found[name]["mfu"])


def test_a_wrong_loss_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    loss = training_steps.Contestant.loss

    def wrong(self):
        return loss(self) * (1.1 if "cu_seqlens" in self._inputs else 1.0)

    monkeypatch.setattr(training_steps.Contestant, "loss", wrong)
    results = list(training_steps.time_steps(SMALL_CASES[0], torch.device("cpu"), rounds=1, matmul_tflop_s=None))
    left_out = {result["provider"]: result["skipped"] for result in results if "skipped" in result}
    assert set(left_out) == {"bert_fast"} and left_out["bert_fast"].startswith("red: loss ")
    assert all(result["mfu"] is None for result in results if "skipped" not in result)


def test_both_forms_of_a_batch_hold_the_same_tokens() -> None:
    batch = make_batch(SMALL_CASES[0], torch.device("cpu"))
    kept = batch.padded["attention_mask"].bool()
    assert batch.packed["input_ids"].tolist() == batch.padded["input_ids"][kept].tolist()
    asked = batch.padded["labels"][kept][batch.packed["masked_lm_positions"]]
    assert asked.tolist() == batch.packed["labels"].tolist() and len(asked) == batch.num_labels
    assert (batch.padded["labels"] != -100).sum() == batch.num_labels
    assert batch.packed["cu_seqlens"].diff().tolist() == batch.lengths
    assert max(batch.lengths) == SMALL_CASES[0].max_len


def test_operations_are_six_for_each_weight_that_a_token_meets() -> None:
    case = StepCase("base", "full", 512, 1)
    layer = 4 * 768**2 + 2 * 768 * 3072
    scores = 12 * 2 * 512 * 768  # q k^T and p v of one token, multiply-adds
    expected = 6 * (512 * (12 * layer + scores) + 77 * (768**2 + 768 * 30522) + 768**2 + 768 * 2)
    assert model_flops(case, [512], 77) == expected
