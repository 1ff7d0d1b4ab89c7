"""MultipleChoiceTask: loss, accuracy and tables of predictions."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.data.multiple_choice import MultipleChoiceSource
from bert_fast.models import BertConfig, BertForMultipleChoice
from bert_fast.tokenization import BertTokenizer
from bert_fast.training.task import Predictions
from bert_fast.training.tasks.multiple_choice import MultipleChoiceTask

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "he", "rides", "stops", "falls", "rain"]
ROWS: list[dict[str, Any]] = [
    {"sent1": "rain", "sent2": "he", "ending0": "stops", "ending1": "falls", "ending2": "rides", "label": 1},
    {"sent1": "he rides", "sent2": "he", "ending0": "falls", "ending1": "rain", "ending2": "stops", "label": 0},
    {"sent1": "he", "sent2": "he", "ending0": "rides", "ending1": "rides he", "ending2": "falls", "label": 2},
]


@pytest.fixture
def source() -> MultipleChoiceSource:
    return MultipleChoiceSource.read(ROWS, BertTokenizer(WORDS))


@pytest.fixture
def model() -> BertForMultipleChoice:
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        **MultipleChoiceTask().model_config(),
    )  # fmt: skip
    return BertForMultipleChoice(config)


def predicted(source: MultipleChoiceSource, logits: list[list[float]]) -> Predictions:
    predictions = Predictions(source.lengths(0))
    for index in (2, 0, 1):
        predictions.add(np.array([index]), {"logits": np.array([logits[index]], dtype=np.float32)})
    return predictions


def test_a_model_learns_which_choice_is_right(source: MultipleChoiceSource, model: BertForMultipleChoice) -> None:
    task = MultipleChoiceTask(source)
    batch = source.batch(0, np.arange(3))
    assert task.label_counts(batch) == {"loss": 3}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        (loss,) = task.loss_parts(model, batch).values()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    predictions = Predictions(source.lengths(0))
    with torch.no_grad():
        for indices in (np.array([2]), np.array([1, 0])):
            parts, said = task.predict(model, source.batch(0, indices))
            expected = torch.nn.functional.cross_entropy(said["logits"], torch.from_numpy(source.labels)[indices])
            torch.testing.assert_close(parts["loss"], expected)
            predictions.add(indices, {name: value.numpy() for name, value in said.items()})
    assert task.score(source, predictions) == {"accuracy": 1.0}


def test_without_labels(model: BertForMultipleChoice) -> None:
    source = MultipleChoiceSource.read(ROWS, BertTokenizer(WORDS), label=None)
    parts, said = MultipleChoiceTask().predict(model, source.batch(0, np.arange(2)))
    assert (parts, said["logits"].shape) == ({}, (2, 3))
    predictions = predicted(source, [[0.0, 1.0, 0.0]] * 3)
    assert "gold" not in next(MultipleChoiceTask().rows(source, predictions))
    with pytest.raises(ValueError, match="expected examples with labels"):
        MultipleChoiceTask().score(source, predictions)


def test_accuracy_and_table(source: MultipleChoiceSource, tmp_path: Path) -> None:
    task = MultipleChoiceTask(None, source)
    predictions = predicted(source, [[0.0, math.log(2), 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 900.0]])
    assert task.score(source, predictions) == {"accuracy": 2 / 3}
    (file,) = task.write_predictions(tmp_path / "valid", source, predictions)
    lines = file.read_text("utf-8").split("\n")
    assert lines[0] == "index\tlabel\tgold\tprobability_0\tprobability_1\tprobability_2\tcontext\tchoice"
    assert lines[1] == "0\t1\t1\t0.250000\t0.500000\t0.250000\train he\tfalls"
    assert lines[3] == "2\t2\t2\t0.000000\t0.000000\t1.000000\the he\tfalls"
    assert lines[4:] == [""]


def test_describe(source: MultipleChoiceSource) -> None:
    assert MultipleChoiceTask(source).describe(source, 0) == source.decode(0)
    with pytest.raises(TypeError, match="source: expected a MultipleChoiceSource, got int"):
        MultipleChoiceTask().describe(3, 0)  # type: ignore[arg-type]
