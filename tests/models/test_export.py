"""torch.export of every model: one program for any batch size and any number of kept tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

import bert_fast

SIZES = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=37,
    max_position_embeddings=16, num_labels=3, use_cache=False,
)  # fmt: skip
LABELS: dict[str, dict[str, int]] = {  # name -> 1: of texts [B], 2: of tokens [B, S]
    "BertModel": {},
    "BertForMaskedLM": {"labels": 2},
    "BertForPreTraining": {"labels": 2, "next_sentence_label": 1},
    "BertLMHeadModel": {"labels": 2},
    "BertForNextSentencePrediction": {"labels": 1},
    "BertForSequenceClassification": {"labels": 1},
    "BertForMultipleChoice": {"labels": 1},
    "BertForTokenClassification": {"labels": 2},
    "BertForQuestionAnswering": {"start_positions": 1, "end_positions": 1},
}


def _call(name: str, batch_size: int) -> dict[str, Tensor]:
    shape = (batch_size, 2, 7) if name == "BertForMultipleChoice" else (batch_size, 7)
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, ..., 7 - batch_size :] = 0
    labels = {label: torch.randint(0, 2, (batch_size, 7)[:dims]) for label, dims in LABELS[name].items()}
    return {"input_ids": torch.randint(1, 40, shape), "attention_mask": mask, **labels}


@pytest.mark.parametrize("name", LABELS)
def test_one_program(name: str) -> None:
    model = getattr(bert_fast, name)(bert_fast.BertConfig(**SIZES, is_decoder=name == "BertLMHeadModel")).eval()
    batch_size, call = torch.export.Dim("batch_size"), _call(name, 3)
    program = torch.export.export(model, (), call, dynamic_shapes={key: {0: batch_size} for key in call}).module()
    for other in (call, _call(name, 2), _call(name, 5)):
        expected: Any = model(**other)
        output = program(**other)
        assert output.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(output[key], value)
