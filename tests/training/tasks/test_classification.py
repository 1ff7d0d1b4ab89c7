"""Classification: labels, metrics against hand-worked numbers, answers, and messages that say where."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.errors import SourceError
from bert_fast.models import BertConfig, BertForSequenceClassification
from bert_fast.tokenization import BertTokenizer
from bert_fast.training.tasks.classification import Classification, ClassificationArguments

datasets = pytest.importorskip("datasets")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "東", "##s"]
TEXTS = ["good film", "bad films 東", "", "good", "x bad bad film film film"]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def rows(labels: list[Any]) -> list[dict[str, Any]]:
    return [{"text": TEXTS[k % 5], "label": label, "more": "good"} for k, label in enumerate(labels)]


def task_of(labels: list[str] | None = None, **arguments: Any) -> Classification:
    return Classification(ClassificationArguments(**arguments), BertTokenizer(WORDS), labels)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["spam", "ham", "ham"], ["ham", "spam"]),
        (["10", "9", "-1", "9"], ["-1", "9", "10"]),
        ([1, 0, 10, 9], ["0", "1", "9", "10"]),
        (["10", "9", "x"], ["10", "9", "x"]),
        ([True, False], ["False", "True"]),
        (["a b", "é", "東"], ["a b", "é", "東"]),
    ],
)
def test_labels_are_numbered_in_order(labels: list[Any], names: list[str]) -> None:
    task = task_of()
    examples = task.read(rows(labels))
    assert task.labels == names
    assert [names[number] for number in examples.labels["labels"]] == [str(label) for label in labels]
    assert task.config() == {"id2label": dict(enumerate(names)), "problem_type": "single_label_classification"}


def test_labels_of_the_first_data_number_those_of_others(tmp_path: Path) -> None:
    task = task_of()
    task.read(rows(["b", "a", "c"]))
    assert task.read(rows(["c", "c"])).labels["labels"].tolist() == [2, 2]
    path = tmp_path / "dev.tsv"
    path.write_text("text\tlabel\ngood\ta\nbad\tneutral\n")
    for of in (task, task_of(["b", "a", "c"])):
        message = r"dev.tsv: line 3: column 'label': expected one of the labels \['\w', '\w', 'c'\], got 'neutral'"
        with pytest.raises(SourceError, match=message):
            of.read(path)


@pytest.mark.parametrize(
    ("labels", "arguments", "message"),
    [
        (["a", None], {}, r"data\[1\]: column 'label': expected a string or a whole number, got None"),
        (["a", ""], {}, r"data\[1\]: column 'label': expected a string or a whole number, got ''"),
        (["a", " \t"], {}, r"data\[1\]: column 'label': .*got ' \\t'"),
        (["a", "b\ud800"], {}, r"data\[1\]: column 'label': .*surrogates not allowed"),
        (["a", ["b"]], {}, r"data\[1\]: column 'label': expected a value like 'a', got \['b'\]"),
        ([1.5, 2.5], {}, r"data\[0\]: .*got 1.5 \(do_regression: labels are numbers\)"),
        (["a", "a"], {}, "column 'label': expected at least two labels, got 'a' in all rows"),
        (["1", "x"], {"do_regression": True}, r"data\[1\]: column 'label': expected a number, got 'x'"),
        ([1.0, float("nan")], {"do_regression": True}, "expected a number, got nan"),
        (["1", "inf"], {"do_regression": True}, "expected a number, got 'inf'"),
        (["5", "1_000"], {"do_regression": True}, "expected a number, got '1_000'"),
        (["5", "٣"], {"do_regression": True}, "expected a number, got '٣'"),
        ([1, 1e39], {"do_regression": True}, r"expected a number, got 1e\+39"),
        ([1, None], {"do_regression": True}, "expected a number, got None"),
        (["a", "b"], {"label_column_name": "class"}, "expected a column 'class', got 'text', 'label', 'more'"),
        (["a", "b"], {"text_pair_column_name": "pair"}, "expected a column 'pair'"),
        (["a", "b"], {"text_column_name": "none"}, "expected a column 'none'"),
    ],
)
def test_labels_and_columns_that_cannot_be_used(labels: list[Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        task_of(**arguments).read(rows(labels))


def test_a_batch_is_the_tokenizers_rows_with_their_labels() -> None:
    examples = task_of(text_pair_column_name="more", max_seq_length=7).read(rows(["a", "b", "b", "a", "b"]))
    expected = BertTokenizer(WORDS)(TEXTS, ["good"] * 5, truncation=True, max_length=7)
    assert examples.lengths(0).tolist() == [len(row) for row in expected["input_ids"]]
    order = [4, 0, 2, 4]
    batch = examples.batch(1, np.array(order))
    assert batch.input_ids.tolist() == [token for index in order for token in expected["input_ids"][index]]
    assert batch.token_type_ids.tolist() == [kind for index in order for kind in expected["token_type_ids"][index]]
    assert (batch.labels.tolist(), batch.labels.dtype) == ([1, 0, 1, 1], torch.int64)


def test_formats_agree(tmp_path: Path) -> None:
    given = [{"text": "good film", "label": "1"}, {"text": "bad films 東", "label": "0"}]
    lines = [*given[0]], *([*row.values()] for row in given)
    (tmp_path / "a.tsv").write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "a.csv").write_text("".join(",".join(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    named = datasets.Dataset.from_list(given).cast_column("label", datasets.ClassLabel(names=["0", "1"]))
    datasets.Dataset.from_list(given).to_parquet(tmp_path / "a.parquet")
    ends = ("tsv", "csv", "jsonl", "parquet")
    for data in (*(tmp_path / f"a.{end}" for end in ends), str(tmp_path / "a.tsv"), given, named):
        examples = task_of().read(data)
        assert examples.sequences.ids.tolist() == [2, 5, 7, 3, 2, 6, 7, 9, 8, 3], data
        assert examples.labels["labels"].tolist() == [1, 0], data


def test_two_classes_by_hand() -> None:
    labels, answers = np.array([0, 1, 1, 1, 0, 0]), [0, 1, 1, 0, 1, 0]  # of class 1: 2 found, 1 missed, 1 wrong
    task = task_of(["a", "b"])
    scores = task.metrics(task.read(rows(["a"] * 6)), np.array([[-k, k] for k in answers]), labels)
    assert scores["accuracy"] == 4 / 6
    assert scores["f1"] == 2 * 2 / (2 * 2 + 1 + 1)
    assert math.isclose(scores["matthews_correlation"], (2 * 2 - 1 * 1) / math.sqrt(3 * 3 * 3 * 3))
    assert (task.metric_for_best_model, task.greater_is_better) == ("accuracy", True)


def test_three_classes_by_hand() -> None:
    task = task_of(["a", "b", "c"])
    scores = task.metrics(task.read(rows(["a"] * 4)), np.eye(3)[[0, 0, 2, 2]], np.array([0, 1, 2, 2]))
    assert scores["accuracy"] == 3 / 4
    assert math.isclose(scores["f1"], (2 / 3 + 0 + 1) / 3)


@pytest.mark.parametrize("answer", [0, 1])
def test_one_answer_for_all(answer: int) -> None:
    task = task_of(["a", "b"])
    scores = task.metrics(task.read(rows(["a", "b"])), np.array([[-answer, answer]] * 2), np.array([0, 1]))
    assert scores == {"accuracy": 0.5, "f1": 2 / 3 if answer else 0.0, "matthews_correlation": 0.0}


@pytest.mark.parametrize("labels", [None, ["LABEL_0"]])  # of a trained model
def test_numbers(labels: list[str] | None) -> None:
    task = task_of(labels, do_regression=labels is None)
    examples = task.read(rows(["1", "2", "3", "5"]))
    assert examples.batch(0, np.array([3, 0])).labels.tolist() == [5.0, 1.0]
    assert examples.batch(0, np.array([3])).labels.dtype == torch.float32
    given = examples.labels["labels"]
    scores = task.metrics(examples, np.array([[2.0], [4.0], [6.0], [10.0]]), given)
    assert math.isclose(scores["pearson"], 1.0) and math.isclose(scores["spearman"], 1.0)
    assert scores["mse"] == (1 + 4 + 9 + 25) / 4
    falling = task.metrics(examples, np.array([[9.0], [4.0], [1.0], [0.0]]), given)
    assert math.isclose(falling["spearman"], -1.0) and -1 < falling["pearson"] < -0.8
    same = task.metrics(examples, np.array([[2.0]] * 4), given)
    assert (same["pearson"], same["spearman"]) == (0.0, 0.0)
    assert (task.metric_for_best_model, task.config()) == ("pearson", {"num_labels": 1, "problem_type": "regression"})
    said = next(task.rows(examples, np.array([[0.5]] * 4)))
    assert said == {"label": 0.5, "gold": 1.0, "text": "good film"}


def test_answers() -> None:
    task = task_of(["no", "yes"], text_pair_column_name="more")
    logits = np.array([[0.0, 0.0], [0.0, math.log(3)], [0.0, 800.0]], dtype=np.float32)  # exp overflows
    labelled = task.read(rows(["no", "yes", "no"]))
    said = list(task.rows(labelled, logits))
    assert said[1] == {
        "label": "yes", "gold": "yes", "probabilities": pytest.approx({"no": 0.25, "yes": 0.75}),
        "text": "bad films 東", "more": "good",
    }  # fmt: skip
    assert [row["label"] for row in said] == ["no", "yes", "yes"]
    assert said[2]["probabilities"] == {"no": 0.0, "yes": 1.0}
    assert [row["text"] for row in task.rows(labelled.take(np.array([2, 1])), logits[:2])] == ["", "bad films 東"]
    examples = task.read([{"text": "good", "more": ""}] * 3, is_labelled=False)
    assert "labels" not in examples.batch(0, np.array([0]))
    assert all("gold" not in row for row in task.rows(examples, logits))


@pytest.mark.parametrize("do_regression", [False, True])
def test_a_model_made_for_the_task_learns(do_regression: bool) -> None:
    torch.set_num_threads(1)
    task = task_of(do_regression=do_regression)
    examples = task.read(rows([1, 0, 1, 0, 1]))
    model = BertForSequenceClassification(BertConfig(**SIZES, **task.config()))
    assert model.config.num_labels == (1 if do_regression else 2)
    batch, losses = examples.batch(0, np.arange(5)), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert losses[-1] < losses[0] / 2
    scores = task.metrics(examples, output.logits.detach().numpy(), batch.labels.numpy())
    assert scores[task.metric_for_best_model] > 0.7


def test_arguments_are_flags() -> None:
    parser = pytest.importorskip("transformers").HfArgumentParser(ClassificationArguments)
    flags = ["--train_file", "a.tsv", "--text_column_name", "1", "--do_regression", "--max_seq_length", "64"]
    (arguments,) = parser.parse_args_into_dataclasses(flags)
    assert arguments == ClassificationArguments("a.tsv", text_column_name="1", do_regression=True, max_seq_length=64)
    assert all("help" in field.metadata for field in arguments.__dataclass_fields__.values())


def test_real_files(shared_data: Path) -> None:
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-uncased")
    arguments = ClassificationArguments(text_column_name="1", label_column_name="0")
    task = Classification(arguments, tokenizer)
    examples = task.read(shared_data / "classification" / "sms_spam" / "SMSSpamCollection.tsv")
    assert (len(examples), task.labels) == (5574, ["ham", "spam"])
    assert examples.labels["labels"].sum() == 747
