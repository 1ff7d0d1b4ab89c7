"""`FlopCounterMode` counts of a fused model what it counts of the untouched one, of a whole step in training."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

import bert_fast
from bert_fast.testing.parity import Case
from tests.huggingface.families import CONFIG, class_name, configuration

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


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("prefix", ["Bert", *CONFIG])
def test_a_fused_model_counts_as_the_untouched_one(prefix: str, task: str) -> None:
    eager = model_of(prefix, task, "eager")
    fused = bert_fast.fuse(copy.deepcopy(eager))
    expected, got = counted(eager), counted(fused)
    hidden, layers = eager.config.hidden_size, eager.config.num_hidden_layers
    scores = 2 * 2 * 6 * 6 * hidden * layers  # which fused attention makes again in backward
    assert got == (expected[0], expected[1] + scores) and got[0] > 0
    if prefix != "MPNet":  # which has one attention only
        sdpa = model_of(prefix, task, "sdpa")
        assert counted(sdpa) == got == counted(bert_fast.fuse(sdpa))


@pytest.mark.parametrize("task", TASKS)
def test_own_classes_count_as_transformers(task: str) -> None:
    theirs = model_of("Bert", task, "sdpa")
    ours = getattr(bert_fast, task)(bert_fast.BertConfig(**theirs.config.to_dict()))
    assert counted(ours)[1] == counted(theirs)[1]  # their cross entropy makes its gradients in forward


def test_a_pooled_head_counts_what_the_last_layer_leaves_out() -> None:
    """Only the first token's row of the last layer is computed."""
    untouched = model_of("Bert", "BertForSequenceClassification", "sdpa")
    assert counted(bert_fast.fuse(copy.deepcopy(untouched)))[1] < counted(untouched)[1]


def test_padding_does_not_count() -> None:
    model = bert_fast.fuse(model_of("Bert", "BertForSequenceClassification", "sdpa"))
    one, other, both = (counted(model, lengths) for lengths in ((6,), (3,), (6, 3)))
    assert [a + b for a, b in zip(one, other, strict=True)] == list(both)
