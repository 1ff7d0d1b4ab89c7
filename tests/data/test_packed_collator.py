"""Single examples to batches without padding."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bert_fast import BertConfig, BertModel
from bert_fast.data import PackedCollator

FEATURES = [
    {"input_ids": [101, 7, 8, 102], "token_type_ids": [0, 0, 1, 1], "label": 1},
    {"input_ids": [101, 102], "token_type_ids": [0, 0], "label": 0},
    {"input_ids": [101, 9, 102], "token_type_ids": [0, 1, 1], "label": 2},
]


def test_tokens_stand_behind_one_another_and_numbers_in_a_row() -> None:
    batch = PackedCollator()(FEATURES)
    assert set(batch) == {"input_ids", "token_type_ids", "labels", "cu_seqlens", "max_seqlen"}
    assert batch["input_ids"].tolist() == [101, 7, 8, 102, 101, 102, 101, 9, 102]
    assert batch["token_type_ids"].tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert batch["labels"].tolist() == [1, 0, 2]
    assert batch["cu_seqlens"].tolist() == [0, 4, 6, 9] and batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"] == 4 and batch.num_sequences == 3


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, tuple], ids=["list", "array", "tensor", "tuple"])
def test_values_may_be_of_any_kind(make: Any) -> None:
    features = [{"input_ids": make([1, 2]), "labels": make([5, -100])}, {"input_ids": make([3]), "labels": make([6])}]
    batch = PackedCollator()(features)
    assert batch["input_ids"].tolist() == [1, 2, 3]
    assert batch["labels"].tolist() == [5, -100, 6]  # of tokens
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def test_numbers_that_are_no_integers_are_fp32() -> None:
    for name in ("label", "label_ids", "labels"):
        batch = PackedCollator()([{"input_ids": [1], name: 0.5}, {"input_ids": [2], name: 1.5}])
        assert batch["labels"].dtype == torch.float32 and batch["labels"].tolist() == [0.5, 1.5]


def test_tokens_that_a_mask_leaves_out_are_gone() -> None:
    features = [
        {"input_ids": [0, 1, 2], "attention_mask": [0, 1, 1], "labels": [9, 8, 7], "start_positions": 4},
        {"input_ids": [3, 0], "attention_mask": [1, 0], "labels": [6, 5], "start_positions": 3},
    ]
    batch = PackedCollator()(features)
    assert set(batch) == {"input_ids", "labels", "start_positions", "cu_seqlens", "max_seqlen"}
    assert batch["input_ids"].tolist() == [1, 2, 3]
    assert batch["labels"].tolist() == [8, 7, 6]
    assert batch["start_positions"].tolist() == [4, 3]
    assert batch["cu_seqlens"].tolist() == [0, 2, 3] and batch["max_seqlen"] == 2


def pad(features: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator of padded batches, which also replaces token 7."""
    rows = [torch.tensor(feature["input_ids"]) for feature in features]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.where(ids == 7, 7, -100)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    numbers = torch.tensor([feature["label"] for feature in features])
    return {"input_ids": ids.masked_fill(ids == 7, 103), "labels": labels, "attention_mask": mask, "number": numbers}


def test_a_collator_of_padded_batches_comes_first() -> None:
    batch = PackedCollator(pad)(FEATURES)
    assert set(batch) == {"input_ids", "labels", "number", "cu_seqlens", "max_seqlen"}
    assert batch["input_ids"].tolist() == [101, 103, 8, 102, 101, 102, 101, 9, 102]
    assert batch["labels"].tolist() == [-100, 7, *[-100] * 7]
    assert batch["number"].tolist() == [1, 0, 2]
    assert batch["cu_seqlens"].tolist() == [0, 4, 6, 9] and batch["max_seqlen"] == 4


def test_masked_language_modeling_with_the_collator_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    from bert_fast import BertTokenizer

    tokenizer = BertTokenizer({word: index for index, word in enumerate(vocab)})
    masking = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    features = [dict(tokenizer(text)) for text in ("a b c d e f", "g h", "")]
    torch.manual_seed(1)
    padded = masking([dict(feature) for feature in features])
    torch.manual_seed(1)
    packed = PackedCollator(masking)(features)
    kept = padded["attention_mask"].bool()
    for key in ("input_ids", "labels", "token_type_ids"):
        assert torch.equal(packed[key], padded[key][kept])
    assert (packed["labels"] != -100).any()
    assert packed["cu_seqlens"].tolist() == [0, 8, 12, 14]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_loaders_use_it(num_workers: int) -> None:
    loader = DataLoader(FEATURES, batch_size=2, collate_fn=PackedCollator(), num_workers=num_workers)  # type: ignore[arg-type]
    first, second = loader
    assert first["cu_seqlens"].tolist() == [0, 4, 6] and second["input_ids"].tolist() == [101, 9, 102]
    assert first.max_seqlen == 4


def test_it_travels_with_its_collator() -> None:
    copy = pickle.loads(pickle.dumps(PackedCollator(pad)))
    assert copy.collator is pad


def test_a_model_takes_its_batches() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=110, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40
    )
    model = BertModel(config).eval()
    batch = PackedCollator()(FEATURES)
    del batch["labels"]
    packed = model(**batch).pooler_output
    for feature, pooled in zip(FEATURES, packed, strict=True):
        alone: dict[str, Tensor] = {k: torch.tensor([v]) for k, v in feature.items() if k != "label"}  # type: ignore[misc]
        torch.testing.assert_close(model(**alone).pooler_output[0], pooled)


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        ({"input_ids": [1]}, TypeError, "features: expected a list of mappings, got dict"),
        ([], ValueError, "features: expected at least one, got none"),
        ([[1, 2]], TypeError, r"features\[0\]: expected a mapping, got list"),
        ([{"ids": [1]}], ValueError, r"features\[0\]: expected the key input_ids, got \['ids'\]"),
        ([{"input_ids": [1]}, {"input_ids": [1], "label": 0}], ValueError,
         r"features\[1\]: expected the keys \['input_ids'\], got \['input_ids', 'label'\]"),
        ([{"input_ids": [[1]]}], ValueError, r"features\[0\]\['input_ids'\]: expected one sequence of integers"),
        ([{"input_ids": [0.5]}], ValueError, r"features\[0\]\['input_ids'\]: expected one sequence of integers"),
        ([{"input_ids": [1], "text": "a"}], TypeError, r"features\[0\]\['text'\]: expected numbers, got str"),
        ([{"input_ids": [1, 2], "labels": [1]}], ValueError,
         r"features\[0\]\['labels'\]: expected a number or 2 entries \(the tokens\), got 1"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1], "labels": 1}], ValueError,
         "labels: expected a number in every feature or entries per token in every one, got both"),
        ([{"input_ids": [1], "label": 1, "labels": 2}], ValueError,
         r"features\[0\]: expected one of labels, label and label_ids, got \['input_ids', 'label', 'labels'\]"),
        ([{"input_ids": [1, 2], "attention_mask": 0}], ValueError,
         r"features\[0\]\['attention_mask'\]: expected 2 entries, got shape \[\]"),
        ([{"input_ids": [1, 2], "attention_mask": [[1, 0], [1, 1]]}], ValueError,
         r"features\[0\]\['attention_mask'\]: expected 2 entries, got shape \[2, 2\]"),
        ([{"input_ids": [1], "x": [[1, 2]]}, {"input_ids": [1], "x": [[1]]}], ValueError,
         r"features\[1\]\['x'\]: expected entries of shape \[2\] as before, got \[1\]"),
        ([{"input_ids": [1], "x": 1j}], TypeError, r"features\[0\]\['x'\]: expected real numbers, got complex"),
    ],
)  # fmt: skip
def test_messages(features: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PackedCollator()(features)


def test_a_collator_without_a_mask_is_named() -> None:
    with pytest.raises(ValueError, match=r"collator: expected a batch with an attention_mask .* got \['input_ids'\]"):
        PackedCollator(lambda features: {"input_ids": torch.zeros(1, 1)})([{"input_ids": [1]}])
