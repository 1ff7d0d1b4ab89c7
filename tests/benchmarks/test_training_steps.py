"""Whole training steps as `make gpu` times them, here on the CPU: right ones only, each contestant, operations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import build, step_cases, training_steps
from benchmarks.models.families import FAMILIES
from benchmarks.models.real_lengths import QUANTILES
from benchmarks.models.step_cases import CASES, SMALL_CASES, StepCase
from benchmarks.models.training_steps import make_batch, make_contestant, model_flops
from bert_fast.testing.tolerances import RELATIVE
from tests import recorded_graph
from tests.benchmarks.conftest import CpuRun
from tests.recorded_graph import RecordedGraph

CPU = torch.device("cpu")
EVERYBODY = ("bert_fast", "fused", "sdpa", "eager", "flash", "compiled")
GRAPHED = {"graph", "fused_graphs"}

FIELDS = {
    "case", "provider", "fill", "ms", "ms_p20", "ms_p80", "host_ms",
    "sequences_per_s", "real_tokens_per_s", "model_tflop_s", "mfu", "matmul_ceiling_tflop_s", "peak_bytes",
    "bert_fast_speedup", "rounds",
}  # fmt: skip


@pytest.mark.usefixtures("flash_on_cpu")
def test_every_contestant_is_timed(cpu_run: CpuRun) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    assert cpu_run.part("steps") == 0
    lines = cpu_run.lines("step")
    left_out = {line["provider"]: line["reason"] for line in cpu_run.lines("skipped")}
    assert set(left_out) == GRAPHED and all("expected a CUDA device" in reason for reason in left_out.values())
    expected = [(case.name, provider) for case in SMALL_CASES for provider in case.providers if provider not in GRAPHED]
    assert [(line["case"], line["provider"]) for line in lines] == expected
    assert all(line["bert_fast_speedup"] == 1.0 for line in lines if line["provider"] in ("bert_fast", "labelled"))
    for line in lines:
        assert set(line) >= FIELDS
        assert line["host_ms"] > 0
        assert line["peak_bytes"] is None
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
    assert list(found) == list(step_cases.COMPILED_PROVIDERS)
    assert all(result["mfu"] > 0 for result in found.values())
    assert sorted(found, key=lambda name: found[name]["ms"]) == sorted(found, key=lambda name: -found[name]["mfu"])


@pytest.mark.usefixtures("flash_on_cpu")
def test_a_wrong_loss_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    loss = training_steps.Contestant.loss

    def wrong(self):
        return loss(self) * (1.1 if "cu_seqlens" in self._inputs else 1.0)

    monkeypatch.setattr(training_steps.Contestant, "loss", wrong)
    results = list(training_steps.time_steps(SMALL_CASES[0], torch.device("cpu"), rounds=1, matmul_tflop_s=None))
    left_out = {result["provider"]: result["skipped"] for result in results if "skipped" in result}
    assert set(left_out) == {"bert_fast"} | GRAPHED and left_out["bert_fast"].startswith("red: loss ")
    assert all(result["mfu"] is None for result in results if "skipped" not in result)


def test_a_case_that_cannot_be_built_costs_no_other(cpu_run: CpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    cases = (StepCase("tiny", "texts_that_are_not_there", 16, 4, vocab_size=100), *SMALL_CASES)
    monkeypatch.setattr(step_cases, "SMALL_CASES", cases)
    assert cpu_run.part("steps") == 0
    assert {line["case"] for line in cpu_run.lines("step")} == {case.name for case in SMALL_CASES}
    left_out = {line["case"]: line for line in cpu_run.lines("skipped") if line["provider"] is None}
    assert set(left_out) == {cases[0].name}
    assert left_out[cases[0].name]["reason"].startswith("FileNotFoundError: ")


def test_every_case_can_be_drawn_where_the_texts_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "DATA", tmp_path)
    for case in CASES:
        lengths = case.draw()
        assert len(lengths) == case.batch_size and max(lengths) == case.max_len and min(lengths) > 0
        assert lengths == case.draw()


@pytest.mark.parametrize("name", QUANTILES)
def test_quantiles_are_those_of_the_texts(name: str, shared_data: Path) -> None:
    path = shared_data / "length_distributions" / f"{name}.json"
    lengths = sorted(json.loads(path.read_text())["sample_lengths"])
    count = len(QUANTILES[name])
    assert QUANTILES[name] == tuple(lengths[int((i + 0.5) / count * len(lengths))] for i in range(count))
    drawn = StepCase("base", name, 512, count).draw()
    assert drawn != sorted(drawn) and sorted(drawn) == list(QUANTILES[name])


class CountedOperators(TorchDispatchMode):
    """How many operators drew numbers, and how many gave tensors on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = self.on_cpu = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "cpu":
            self.on_cpu += 1
            self.draws += torch.Tag.nondeterministic_seeded in func.tags
        return made


def test_weights_are_drawn_once_for_all_contestants() -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    case = SMALL_CASES[0]
    with CountedOperators() as of_donor:
        donor = training_steps.draw_donor(case, CPU)
    batch = make_batch(case, CPU)
    with CountedOperators() as of_others:
        models = [make_contestant(provider, case, batch, donor, "eager").model for provider in EVERYBODY]
    assert of_donor.draws > 0 and of_others.draws == 0
    expected = dict(donor.named_parameters())
    addresses = {parameter.data_ptr() for parameter in expected.values()}
    assert len(addresses) == len(expected)
    for model in models:
        found = dict(model.named_parameters())
        assert found.keys() == expected.keys(), "what is tied in one is tied in all"
        assert all(torch.equal(parameter, expected[name]) for name, parameter in found.items())
        assert addresses.isdisjoint(parameter.data_ptr() for parameter in found.values())
        addresses |= {parameter.data_ptr() for parameter in found.values()}
        assert not any(tensor.is_meta for tensor in model.state_dict().values())
        assert not any(buffer.is_meta for buffer in model.buffers())


def test_of_another_family_all_start_from_one_model() -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    case = SMALL_CASES[1]
    donor, batch = training_steps.draw_donor(case, CPU), make_batch(case, CPU)
    assert type(donor).__name__ == "RobertaForMaskedLM" and set(batch.padded) == {
        "input_ids",
        "attention_mask",
        "labels",
    }
    assert (batch.padded["input_ids"][batch.padded["attention_mask"] == 0] == donor.config.pad_token_id).all()
    found = {provider: make_contestant(provider, case, batch, donor) for provider in case.providers}
    for provider, contestant in found.items():
        contestant.model.eval()
        with torch.no_grad():
            assert (contestant.model(**contestant._inputs).logits is None) == (provider == "labelled")
            assert float(contestant.loss()) == pytest.approx(
                float(found["sdpa"].loss()), rel=RELATIVE["training_step_loss_bf16"]
            )


def test_of_other_families_nothing_is_compiled_or_replayed() -> None:
    assert not any(case.is_compiled for case in (*CASES, *SMALL_CASES) if not case.is_bert)
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) and {"Roberta", "XLMRoberta"} <= {case.family for case in CASES}
    for case in CASES:
        assert case.vocab_size == FAMILIES[case.family].vocab_size


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.family)
def test_weights_are_drawn_on_the_device(case: StepCase) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    with CountedOperators() as counted:
        donor = training_steps.draw_donor(case, torch.device("meta"))
    batch = make_batch(case, CPU)
    with counted:
        models = [make_contestant(name, case, batch, donor).model for name in case.providers if name not in GRAPHED]
    assert all(parameter.is_meta for model in models for parameter in model.parameters())
    assert counted.on_cpu == 0


@pytest.mark.usefixtures("flash_on_cpu")
def test_the_graph_is_captured_once_and_replayed_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    recorded_graph.install(monkeypatch)
    rounds = 3
    results = list(training_steps.time_steps(SMALL_CASES[0], CPU, rounds=rounds, matmul_tflop_s=None))
    assert [result["provider"] for result in results] == [*SMALL_CASES[0].providers, "graph"]
    assert all(set(result) >= FIELDS for result in results)
    assert len(RecordedGraph.all) == 1
    assert RecordedGraph.num_replays == rounds + 1, "one round is not counted"


def test_a_replay_is_the_step_that_it_was_captured_from(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    recorded_graph.install(monkeypatch)
    case, batch = SMALL_CASES[0], make_batch(SMALL_CASES[0], CPU)
    donor = training_steps.draw_donor(case, CPU)
    losses = {}
    for provider in ("bert_fast", "graph"):
        contestant = make_contestant(provider, case, batch, donor)
        contestant.model.eval()  # without dropout: a replay draws a seed of its own
        losses[provider] = []
        for _ in range(training_steps.WARMUP_STEPS + 4):
            contestant.step()
            losses[provider].append(float(contestant.last_loss))
    assert RecordedGraph.num_replays == 4
    assert losses["graph"] == pytest.approx(losses["bert_fast"], rel=RELATIVE["replayed_steps"])
    assert len(set(losses["graph"])) == len(losses["graph"]), "weights change with every replay"


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
