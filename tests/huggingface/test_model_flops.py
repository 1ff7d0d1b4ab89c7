"""`FlopCounterMode` counts of a fused model what it counts of the untouched one, of a whole step in training."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

import bert_fast
from bert_fast.testing.parity import Case
from tests.huggingface.families import CONFIG, ONLY_EAGER, class_name, configuration

# PyTorch has formulas for the fused attention of GPUs only, and this one's arguments are alike.
_aten = torch.ops.aten
FUSED_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop.__wrapped__,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop.__wrapped__,
}
TASKS = ("BertForMaskedLM", "BertForTokenClassification")


def model_of(prefix: str, task: str, attention: str) -> Any:
    cls = getattr(transformers, class_name(prefix, task))
    values = {**Case("plain").full_config(), **CONFIG.get(prefix, {})}
    values |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return cls._from_config(configuration(cls, **values), attn_implementation=attention)


def counted(model: Any, lengths: tuple[int, ...] = (6, 6)) -> tuple[int, int]:
    """FLOPs of forward, and of both passes; every token has a label."""
    ids = torch.full((len(lengths), max(lengths)), 5)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    labels = torch.zeros(len(lengths), dtype=torch.long) if "Sequence" in type(model).__name__ else ids % 2
    with FlopCounterMode(display=False, custom_mapping=FUSED_ATTENTION) as counter:
        loss = model.train()(input_ids=ids, attention_mask=mask.long(), labels=labels).loss
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


def own_of(theirs: Any) -> Any:
    """Our class for one of transformers' BERT."""
    return getattr(bert_fast, type(theirs).__name__)(bert_fast.BertConfig(**theirs.config.to_dict()))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("prefix", ["Bert", *CONFIG])
def test_a_fused_model_counts_as_the_untouched_one(prefix: str, task: str) -> None:
    """The counter registers hooks of every module, so transformers' code runs under it."""
    for attention in ("eager", "sdpa") if prefix not in ONLY_EAGER else ("eager",):
        untouched = model_of(prefix, task, attention)
        expected = counted(untouched)
        assert counted(bert_fast.fuse(untouched)) == expected and min(expected) > 0


@pytest.mark.parametrize("task", TASKS)
def test_own_classes_count_as_transformers(task: str) -> None:
    theirs = model_of("Bert", task, "sdpa")
    assert counted(own_of(theirs))[1] == counted(theirs)[1]  # their cross entropy makes its gradients in forward


def test_own_pooled_heads_count_what_the_last_layer_leaves_out() -> None:
    """Only the first token's row of the last layer is computed."""
    untouched = model_of("Bert", "BertForSequenceClassification", "sdpa")
    assert counted(own_of(untouched))[1] < counted(untouched)[1]


def test_padding_does_not_count() -> None:
    model = own_of(model_of("Bert", "BertForSequenceClassification", "sdpa"))
    one, other, both = (counted(model, lengths) for lengths in ((6,), (3,), (6, 3)))
    assert [a + b for a, b in zip(one, other, strict=True)] == list(both)
