import dataclasses

import pytest
import torch

from bert_fast.models.config import BertConfig
from bert_fast.training.observers import Plan, Step
from bert_fast.training.reporting import flops
from bert_fast.training.reporting.flops import model_flops, model_flops_utilisation, peak_flops

CONFIG = BertConfig(
    vocab_size=97, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40, num_labels=5
)
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
LENGTH = 7


def counted_flops(class_name: str, num_labels: int = 5, **labels: torch.Tensor) -> int:
    """Of forward and backward of transformers' model on one sequence, as PyTorch counts them."""
    transformers = pytest.importorskip("transformers", reason="the model whose products are counted")
    from torch.utils.flop_counter import FlopCounterMode

    values = {name: getattr(CONFIG, name) for name in SIZES}
    config = transformers.BertConfig(**values, num_labels=num_labels, attn_implementation="eager")
    model = getattr(transformers, class_name)(config)
    ids = torch.arange(1, LENGTH + 1)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, **labels).loss.backward()
    return counter.get_total_flops()


def of_length(length: int, found: tuple[float, float]) -> float:
    return length * found[0] + length**2 * found[1]


def test_token_models_count_what_pytorch_counts() -> None:
    labels = torch.zeros(1, LENGTH, dtype=torch.int64)
    counted = counted_flops("BertForTokenClassification", labels=labels)
    assert of_length(LENGTH, model_flops(CONFIG, "BertForTokenClassification")) == counted
    ends = {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([2])}
    counted = counted_flops("BertForQuestionAnswering", num_labels=2, **ends)
    assert of_length(LENGTH, model_flops(CONFIG, "BertForQuestionAnswering")) == counted


def test_word_models_count_the_head_on_labelled_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counted_flops("BertForMaskedLM", labels=torch.zeros(1, LENGTH, dtype=torch.int64))
    share = model_flops(CONFIG, "BertForMaskedLM")
    encoder = model_flops(CONFIG, "BertModel")
    monkeypatch.setattr(flops, "LABEL_SHARE", 1.0)
    everywhere = model_flops(CONFIG, "BertForMaskedLM")
    assert of_length(LENGTH, everywhere) == counted
    assert share[0] - encoder[0] == pytest.approx(0.15 * (everywhere[0] - encoder[0]))
    assert share[1] == encoder[1] == everywhere[1]


def test_under_a_head_of_first_tokens_the_last_layer_has_keys_and_values() -> None:
    found = model_flops(CONFIG, "BertForSequenceClassification")
    shorter = model_flops(CONFIG.with_overrides(num_hidden_layers=2), "BertModel")
    hidden = CONFIG.hidden_size
    assert found == (shorter[0] + 3 * 2 * 2 * hidden * hidden, shorter[1])


def test_pruned_heads_and_distances() -> None:
    whole = model_flops(CONFIG, "BertModel")
    pruned = model_flops(CONFIG.with_overrides(pruned_heads={0: [0], 2: [1, 3]}), "BertModel")
    head_dim = CONFIG.hidden_size // CONFIG.num_attention_heads
    assert whole[0] - pruned[0] == 3 * 2 * 4 * CONFIG.hidden_size * 3 * head_dim
    assert whole[1] - pruned[1] == 3 * 4 * 3 * head_dim
    keyed = [
        model_flops(CONFIG.with_overrides(position_embedding_type=kind), "BertModel")[1]
        for kind in ("absolute", "relative_key", "relative_key_query")
    ]
    assert keyed == [whole[1], whole[1] * 1.5, whole[1] * 2]


def test_configurations_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="whose configuration has fewer fields")
    values = {name: getattr(CONFIG, name) for name in SIZES}
    theirs = transformers.BertConfig(**values, num_labels=5)
    for name in ("BertModel", "BertForMaskedLM", "BertForTokenClassification", "BertForSequenceClassification"):
        assert model_flops(theirs, name) == model_flops(CONFIG, name)


def test_bert_base_is_about_six_flops_a_parameter() -> None:
    per_token, per_square = model_flops(BertConfig(), "BertModel")
    assert per_token == 6 * 12 * 12 * 768 * 768  # 85M parameters in the matrices of its layers
    assert per_square == 12 * 12 * 768


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("AMD Instinct MI300X", "bf16", 1307.4e12),
        ("CPU AMD A10-7850K, 4 cores", "fp32", None),
        ("AMD EPYC", "fp32", None),
        ("", "bf16", None),
    ],
)
def test_peaks(device: str, precision: str, expected: float | None) -> None:
    assert peak_flops(device, precision) == expected


def test_fp32_may_mean_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 156e12
        assert peak_flops("Tesla V100-SXM2-16GB", "fp32") == 15.7e12
    finally:
        torch.set_float32_matmul_precision(before)


def test_utilisation(plan: Plan) -> None:
    step = Step(1, 0.1, 10, {"loss": 1.0}, 1e-4, None, 1000, 50_000, 10, 1024, 0.5, 0.0, 1)
    share = (1000 * 6e8 + 50_000 * 1e5) / (0.5 * 989e12)
    assert model_flops_utilisation(plan, step) == share
    assert model_flops_utilisation(dataclasses.replace(plan, num_processes=4), step) == share / 4
    for device in ("CPU AMD EPYC, 2 cores", "NVIDIA Unheard Of"):
        assert model_flops_utilisation(dataclasses.replace(plan, device=device), step) is None
    assert model_flops_utilisation(plan, dataclasses.replace(step, seconds=0.0)) is None
    without = dataclasses.replace(plan, flops_per_token=0.0, flops_per_square=0.0)
    assert model_flops_utilisation(without, step) is None
