"""ClassificationTask: loss, metrics against hand-worked numbers, tables of predictions."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.data.classification import ClassificationSource
from bert_fast.models import BertConfig, BertForSequenceClassification
from bert_fast.tokenization import BertTokenizer
from bert_fast.training.task import Predictions
from bert_fast.training.tasks.classification import ClassificationTask

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def source_of(
    given: list[Any] | None, regression: bool = False, pairs: bool = False, **options: Any
) -> ClassificationSource:
    texts = ["good film", "bad\tfilm\n2", "good", "bad", "film good", "film"]
    count = 6 if given is None else len(given)
    rows = [{"text": texts[k % 6], "other": "film"} | ({"label": given[k]} if given else {}) for k in range(count)]
    return ClassificationSource.read(
        rows, BertTokenizer(WORDS), text_pair="other" if pairs else None, label="label" if given else None,
        regression=regression, **options,
    )  # fmt: skip


def predictions_of(source: ClassificationSource, logits: list[list[float]]) -> Predictions:
    """Added in two batches, the second examples first."""
    predictions = Predictions(source.lengths(0))
    array = np.array(logits, dtype=np.float32)
    half = len(array) // 2
    predictions.add(np.arange(half, len(array)), {"logits": array[half:]})
    predictions.add(np.arange(half), {"logits": array[:half]})
    return predictions


def test_two_classes_by_hand() -> None:
    source = source_of(["a", "b", "b", "b", "a", "a"])
    answers = [0, 1, 1, 0, 1, 0]  # of class b: 2 found, 1 missed, 1 wrongly named
    scores = ClassificationTask(source).score(source, predictions_of(source, [[-k, k] for k in answers]))
    assert scores["accuracy"] == 4 / 6
    assert scores["f1"] == 2 * 2 / (2 * 2 + 1 + 1)
    assert math.isclose(scores["matthews_correlation"], (2 * 2 - 1 * 1) / math.sqrt(3 * 3 * 3 * 3))


def test_three_classes_by_hand() -> None:
    source = source_of(["a", "b", "c", "c"])
    answers = [0, 0, 2, 2]
    logits = [[float(k == answer) for k in range(3)] for answer in answers]
    scores = ClassificationTask(source).score(source, predictions_of(source, logits))
    assert scores["accuracy"] == 3 / 4
    assert math.isclose(scores["f1"], (2 / 3 + 0 + 1) / 3)


@pytest.mark.parametrize("answer", [0, 1])
def test_one_answer_for_all(answer: int) -> None:
    source = source_of(["a", "b"])
    scores = ClassificationTask(source).score(source, predictions_of(source, [[-answer, answer]] * 2))
    assert scores == {"accuracy": 0.5, "f1": 2 / 3 if answer else 0.0, "matthews_correlation": 0.0}


def test_numbers_by_hand() -> None:
    source = source_of([1, 2, 3, 5], regression=True)
    task = ClassificationTask(source)
    scores = task.score(source, predictions_of(source, [[2.0], [4.0], [6.0], [10.0]]))
    assert math.isclose(scores["pearson"], 1.0)
    assert math.isclose(scores["spearman"], 1.0)
    assert scores["mse"] == (1 + 4 + 9 + 25) / 4
    reversed_scores = task.score(source, predictions_of(source, [[9.0], [4.0], [1.0], [0.0]]))
    assert math.isclose(reversed_scores["spearman"], -1.0)
    assert -1 < reversed_scores["pearson"] < -0.8
    same = task.score(source, predictions_of(source, [[2.0]] * 4))
    assert (same["pearson"], same["spearman"]) == (0.0, 0.0)
    assert (task.metric, task.higher_is_better) == ("pearson", True)


@pytest.mark.parametrize("regression", [False, True])
def test_a_model_made_for_the_task_learns(regression: bool) -> None:
    torch.set_num_threads(1)
    source = source_of([1, 0, 1, 0, 1, 0], regression=regression)
    task = ClassificationTask(source, source)
    model = BertForSequenceClassification(BertConfig(**SIZES, **task.model_config()))
    assert model.config.num_labels == (1 if regression else 2)
    batch = source.batch(0, np.arange(6))
    assert task.label_counts(batch) == {"loss": 6}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        (loss,) = task.loss_parts(model, batch).values()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    predictions = Predictions(source.lengths(0))
    with torch.no_grad():
        for indices in (np.array([5, 0, 2]), np.array([1, 3, 4])):
            parts, said = task.predict(model.eval(), source.batch(0, indices))
            assert set(parts) == {"loss"}
            predictions.add(indices, {name: value.numpy() for name, value in said.items()})
    scores = task.score(source, predictions)
    assert scores["pearson" if regression else "accuracy"] > 0.7
    assert task.predict(model, source_of(None).batch(0, np.arange(2)))[0] == {}


def test_the_loss_is_that_of_the_definition() -> None:
    source = source_of(["a", "b", "c"])
    task = ClassificationTask(source)
    model = BertForSequenceClassification(BertConfig(**SIZES, **task.model_config())).eval()
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    parts, said = task.predict(model, source.batch(0, np.arange(3)))
    expected = torch.nn.functional.cross_entropy(said["logits"], torch.tensor([0, 1, 2]))
    torch.testing.assert_close(parts["loss"], expected)


def read_table(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_predictions_of_classes_as_a_table(tmp_path: Path) -> None:
    source = source_of(["no", "yes"], pairs=True)
    task = ClassificationTask(source)
    predictions = predictions_of(source, [[0.0, 0.0], [0.0, math.log(3)]])
    files = task.write_predictions(tmp_path / "new" / "valid", source, predictions)
    assert files == [tmp_path / "new" / "valid.tsv"]
    assert read_table(files[0]) == [
        {"index": "0", "label": "no", "gold": "no", "probability_no": "0.500000", "probability_yes": "0.500000",
         "text": "good film", "text_pair": "film"},
        {"index": "1", "label": "yes", "gold": "yes", "probability_no": "0.250000", "probability_yes": "0.750000",
         "text": "bad film 2", "text_pair": "film"},
    ]  # fmt: skip


def test_predictions_without_labels(tmp_path: Path) -> None:
    source = source_of(None, labels=["no", "yes"])
    logits = [[0.0, 800.0 * (-1) ** k] for k in range(6)]  # far enough apart for exp to overflow
    rows = list(ClassificationTask().rows(source, predictions_of(source, logits)))
    assert [row["label"] for row in rows] == ["yes", "no"] * 3
    assert [row["probability_yes"] for row in rows] == [1.0, 0.0] * 3
    assert "gold" not in rows[0]
    assert rows[1]["text"] == "bad\tfilm\n2"
    nameless = list(ClassificationTask().rows(source_of(None), predictions_of(source, logits)))
    assert nameless[0]["label"] == "LABEL_1"
    with pytest.raises(ValueError, match="expected examples with labels"):
        ClassificationTask().score(source, predictions_of(source, logits))


def test_predictions_of_numbers() -> None:
    source = source_of([1.5, 2], regression=True)
    rows = list(ClassificationTask(source).rows(source, predictions_of(source, [[0.5], [4.0]])))
    assert rows[0] == {"index": 0, "label": 0.5, "gold": 1.5, "text": "good film"}


def test_describe() -> None:
    source = source_of(["no", "yes"])
    assert ClassificationTask(source).describe(source, 0) == "[CLS] good film [SEP] -> no"


def test_sources_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"valid: expected labels as in train, classes \['a', 'b'\], got classes"):
        ClassificationTask(source_of(["a", "b"]), source_of(["b", "c"]))
    with pytest.raises(ValueError, match="got numbers"):
        ClassificationTask(source_of(["1", "2"]), source_of(["1", "2"], regression=True))
    with pytest.raises(ValueError, match="expected labelled examples"):
        ClassificationTask(source_of(None)).model_config()
    with pytest.raises(TypeError, match="source: expected a ClassificationSource, got list"):
        ClassificationTask().describe([], 0)  # type: ignore[arg-type]
