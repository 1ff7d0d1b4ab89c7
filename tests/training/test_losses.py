"""Labels and parts of a batch's loss: counts by hand, and sums against the models."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bert_fast import BertConfig, BertForPreTraining, BertForSequenceClassification
from bert_fast.models.outputs import SequenceClassifierOutput
from bert_fast.training.losses import label_counts, loss_parts
from tests.training.toy import ToySource, toy_model

CU_SEQLENS = torch.tensor([0, 3, 5, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"labels": torch.tensor([1, 0, 2])}, {"loss": 3}),
        ({"labels": torch.tensor([1, -100, 2, -100])}, {"loss": 2}),
        ({"labels": torch.tensor([[1, -100], [-100, -100]])}, {"loss": 1}),
        ({"labels": torch.tensor([-100, -100])}, {"loss": 0}),
        ({"labels": torch.tensor([-100.0, 0.5])}, {"loss": 2}),  # numbers: -100 is one of them
        ({"labels": torch.tensor([4, -100]), "next_sentence_label": torch.tensor([0, 1, 1])},
         {"masked_lm": 1, "next_sentence": 3}),
        ({"start_positions": torch.tensor([0, 2, 1]), "cu_seqlens": CU_SEQLENS}, {"loss": 2}),
        ({"start_positions": torch.tensor([0, 4]), "input_ids": torch.zeros(2, 4)}, {"loss": 1}),
        ({"input_ids": torch.tensor([1])}, {}),
    ],
    ids=["classes", "ignored", "padded", "none but ignored", "numbers", "pairs", "answers", "padded answers", "none"],
)  # fmt: skip
def test_counts(batch: dict[str, Any], expected: dict[str, int]) -> None:
    assert label_counts(batch) == expected


def test_one_part_is_the_loss_of_the_model() -> None:
    batch = ToySource(8).batch(0, np.arange(8))
    with torch.no_grad():
        outputs = toy_model().eval()(**batch)
    assert loss_parts(outputs, batch) == {"loss": outputs.loss}
    assert loss_parts((outputs.loss, outputs.logits), batch) == {"loss": outputs.loss}


def pairs() -> tuple[Any, dict[str, Any]]:
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, initializer_range=0.3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForPreTraining(config)
    batch: dict[str, Any] = dict(
        input_ids=torch.randint(0, 30, (9,)), cu_seqlens=CU_SEQLENS, max_seqlen=4,
        labels=torch.tensor([-100, 4, -100, -100, 7, -100, 9, 2, -100]), next_sentence_label=torch.tensor([0, 1, 0]),
    )  # fmt: skip
    return model, batch


def test_two_parts_are_those_that_the_model_adds_up() -> None:
    model, batch = pairs()
    outputs = model(**batch)
    parts = loss_parts(outputs, batch)
    torch.testing.assert_close(parts["masked_lm"] + parts["next_sentence"], outputs.loss)
    expected = F.cross_entropy(outputs.seq_relationship_logits, batch["next_sentence_label"])
    torch.testing.assert_close(parts["next_sentence"], expected)
    with torch.no_grad():
        scores = model(**{name: batch[name] for name in ("input_ids", "cu_seqlens", "max_seqlen")}).prediction_logits
    torch.testing.assert_close(parts["masked_lm"], F.cross_entropy(scores, batch["labels"]))


def test_parts_may_be_weighted_apart() -> None:
    """What one part's weight is does not reach what only the other uses."""
    model, batch = pairs()
    for weights, is_still in (
        ({"masked_lm": 2.0, "next_sentence": 0.0}, model.cls.seq_relationship.weight),
        ({"masked_lm": 0.0, "next_sentence": 2.0}, model.cls.predictions.bias),
    ):
        parts = loss_parts(model(**batch), batch)
        total = sum(weights[name] * part for name, part in parts.items())
        (gradient,) = torch.autograd.grad(total, is_still)
        assert not gradient.any()


def test_a_model_without_a_loss() -> None:
    batch = {"input_ids": torch.tensor([1]), "targets": torch.tensor([1])}
    assert isinstance(toy_model(), BertForSequenceClassification)
    with pytest.raises(ValueError, match="model: expected a loss, got logits for a batch of input_ids, targets"):
        loss_parts(SequenceClassifierOutput(logits=torch.zeros(1, 2)), batch)
