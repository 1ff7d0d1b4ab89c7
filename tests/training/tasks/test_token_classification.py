"""TokenClassification: words and their tokens, metrics by hand, answers, and messages that say where."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.data.conll import read_conll
from bert_fast.data.examples import Examples
from bert_fast.errors import SourceError
from bert_fast.models import BertConfig, BertForTokenClassification
from bert_fast.tokenization import BertTokenizer
from bert_fast.training.tasks.token_classification import TokenClassification, TokenClassificationArguments
from tests.data.corpora import rows_of

datasets = pytest.importorskip("datasets")

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "john", "##son", "lives", "in", "os", "##lo", ".", "new"]
NAMES = ["O", "B-LOC", "I-LOC", "B-PER"]
ROWS: list[dict[str, Any]] = [
    {"tokens": ["Johnson", "lives", "in", "\u200b", "Oslo", "."],
     "ner_tags": ["B-PER", "O", "O", "I-LOC", "B-LOC", "O"]},
    {"tokens": ["\ufffd", "\x07"], "ner_tags": ["O", "O"]},
    {"tokens": [], "ner_tags": []},
    {"tokens": ["Oslo"], "ner_tags": ["B-LOC"]},
]  # fmt: skip


def task_of(labels: list[str] | None = None, **arguments: Any) -> TokenClassification:
    return TokenClassification(TokenClassificationArguments(**arguments), BertTokenizer(VOCABULARY), labels)


def tokens(examples: Examples) -> list[list[str]]:
    """Without special tokens."""
    tokenizer = BertTokenizer(VOCABULARY)
    return [tokenizer.convert_ids_to_tokens(row[1:-1]) for row in rows_of(examples.sequences)]


def one_hot(answers: np.ndarray, count: int) -> np.ndarray:
    """Logits of these answers; where there is none (-100), of the last label."""
    return np.eye(count, dtype=np.float32)[np.where(answers < 0, count - 1, answers)]


def test_first_tokens_carry_the_labels() -> None:
    task = task_of()
    examples = task.read(ROWS)
    assert task.labels == NAMES
    assert tokens(examples) == [["john", "##son", "lives", "in", "os", "##lo", "."], [], [], ["os", "##lo"]]
    expected = [-100, 3, -100, 0, 0, 1, -100, 0, -100, *[-100] * 4, -100, 1, -100, -100]
    assert examples.labels["labels"].tolist() == expected
    batch = examples.batch(0, np.array([3, 0]))
    assert (batch.labels.tolist(), batch.labels.dtype) == (expected[13:] + expected[:9], torch.int64)
    assert task.config() == {"id2label": dict(enumerate(NAMES))}


def test_labels_are_ordered_by_type() -> None:
    task = task_of()
    labels = ["I-PER", "O", "I-LOC", "B-PER", "B-LOC", "I-ÄÖ"]
    task.read([{"tokens": ["john"] * 6, "ner_tags": labels}])
    assert task.labels == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER", "I-ÄÖ"]


def test_long_sentences_are_divided_between_words() -> None:
    examples = task_of(max_seq_length=5).read(ROWS)  # room for 3 tokens
    assert tokens(examples) == [["john", "##son", "lives"], ["in", "os", "##lo"], ["."], [], [], ["os", "##lo"]]
    assert examples.row_of.tolist() == [0, 0, 0, 1, 2, 3]
    assert (examples.labels["labels"] >= 0).sum() == 6


def test_words_longer_than_an_example_keep_their_beginning() -> None:
    examples = task_of(max_seq_length=3).read(ROWS)
    assert tokens(examples) == [["john"], ["lives"], ["in"], ["os"], ["."], [], [], ["os"]]
    assert examples.labels["labels"].reshape(-1)[9:12].tolist() == [-100, 1, -100]
    with pytest.raises(ValueError, match="max_seq_length: expected at least 3, got 2"):
        task_of(max_seq_length=2)


def test_labels_come_from_training(tmp_path: Path) -> None:
    names = ["B-PER", "B-LOC", "O", "I-PER", "I-LOC"]
    task = task_of(names)
    assert task.read(ROWS).labels["labels"][-4:].tolist() == [-100, 1, -100, -100] and task.labels == names
    file = tmp_path / "valid.conll"
    file.write_text("Oslo B-LOC\n\nlives O\nin B-ORG\n")
    with pytest.raises(SourceError, match=r"valid.conll: line 4: expected one of 'B-PER', .*, 'I-LOC', got 'B-ORG'"):
        task.read(file)
    with pytest.raises(SourceError, match=r"data\[1\]: column 'ner_tags': expected one of .* got 'B-ORG'"):
        task.read([ROWS[0], {"tokens": ["in"], "ner_tags": ["B-ORG"]}])


@pytest.mark.parametrize("max_seq_length", [256, 5, 3])
def test_right_answers_are_right(max_seq_length: int) -> None:
    task = task_of(max_seq_length=max_seq_length)
    examples = task.read(ROWS)
    logits = one_hot(examples.labels["labels"], 4)
    # A word of which no token is left has the answer O: wrong for one of nine.
    assert task.metrics(examples, logits, examples.labels["labels"])["accuracy"] == 8 / 9
    said = list(task.rows(examples, logits))
    assert said[0] == {
        "tokens": ROWS[0]["tokens"], "labels": ["B-PER", "O", "O", "O", "B-LOC", "O"], "gold": ROWS[0]["ner_tags"],
    }  # fmt: skip
    assert [len(row["labels"]) for row in said] == [6, 2, 0, 1]


ENTITIES: list[dict[str, Any]] = [
    {"tokens": ["john", "lives", "in", "new", "oslo"], "ner_tags": ["B-PER", "I-PER", "O", "B-LOC", "I-LOC"]},
    {"tokens": ["oslo", "\u200b", "."], "ner_tags": ["B-LOC", "I-LOC", "O"]},
]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        # The word of which no token is left is missed: new oslo is right, oslo ends too early.
        ("B-PER I-PER O B-LOC I-LOC B-LOC O", {"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "accuracy": 7 / 8}),
        # No entity found of three, two wrong ones: john alone, new oslo as a person.
        ("B-PER O O B-PER I-PER O O", {"precision": 0, "recall": 0, "f1": 0, "accuracy": 3 / 8}),
        # I- without B- begins an entity; I- of another type begins one, too.
        ("I-PER I-PER O I-LOC I-LOC O O", {"precision": 1, "recall": 2 / 3, "f1": 0.8, "accuracy": 4 / 8}),
        ("O O O O O O O", {"precision": 0, "recall": 0, "f1": 0, "accuracy": 2 / 8}),
    ],
)
@pytest.mark.parametrize("max_seq_length", [256, 4])
def test_metrics_by_hand(answers: str, expected: dict[str, float], max_seq_length: int) -> None:
    task = task_of(max_seq_length=max_seq_length)
    examples = task.read(ENTITIES)
    assert task.labels is not None and task.metric_for_best_model == "f1" and task.greater_is_better
    labels = examples.labels["labels"]
    said = np.full_like(labels, -100)
    said[labels >= 0] = [task.labels.index(answer) for answer in answers.split()]
    assert task.metrics(examples, one_hot(said, 5), labels) == pytest.approx(expected)


def test_other_labels_have_no_entities() -> None:
    task = task_of()
    examples = task.read([{"tokens": ["john", "lives"], "ner_tags": ["NOUN", "VERB"]}])
    assert task.metric_for_best_model == "accuracy"
    logits = one_hot(np.zeros(4, dtype=np.int64), 2)
    assert task.metrics(examples, logits, examples.labels["labels"]) == {"accuracy": 0.5}


def test_without_labels() -> None:
    task = task_of(NAMES)
    examples = task.read([{"tokens": ["john", "a\tb\n"]}, {"tokens": ["oslo"]}], is_labelled=False)
    assert "labels" not in examples.batch(0, np.array([0]))
    logits = one_hot(np.array([0, 3, 0, 0, 0, 0, 1, 0, 0]), 4)
    assert list(task.rows(examples, logits)) == [
        {"tokens": ["john", "a\tb\n"], "labels": ["B-PER", "O"]}, {"tokens": ["oslo"], "labels": ["B-LOC"]},
    ]  # fmt: skip
    assert list(task.rows(examples.take(np.array([1])), logits[5:])) == [{"tokens": ["oslo"], "labels": ["B-LOC"]}]


def test_formats_agree(tmp_path: Path) -> None:
    given = [{"words": ["john", "lives"], "tags": ["B-PER", "O"]}, {"words": ["oslo"], "tags": ["B-LOC"]}]
    task = task_of(text_column_name="words", label_column_name="tags", label_column=2)
    (tmp_path / "a.conll").write_text("john x B-PER y\nlives x O y\n\noslo x B-LOC y\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    data = datasets.Dataset.from_list(given)
    data.to_parquet(tmp_path / "a.parquet")
    classes = datasets.List(datasets.ClassLabel(names=["B-LOC", "B-PER", "O"]))
    for one in (
        given,
        tmp_path / "a.conll",
        tmp_path / "a.jsonl",
        tmp_path / "a.parquet",
        data.cast_column("tags", classes),
    ):
        examples = task.read(one)
        assert tokens(examples) == [["john", "lives"], ["os", "##lo"]], one
        assert examples.labels["labels"].tolist() == [-100, 2, 0, -100, -100, 1, -100, -100], one


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "expected at least one row"),
        ([ROWS[0], {"tokens": ["a"], "ner_tags": []}], r"data\[1\]: column 'ner_tags': expected a list .* got \[\]"),
        ([{"tokens": "John ran", "ner_tags": []}], r"data\[0\]: column 'tokens': expected a list .* got 'John ran'"),
        ([{"tokens": ["a", None], "ner_tags": ["O", "O"]}], r"column 'tokens': .* got \['a', None\]"),
        ([ROWS[0], {"tokens": ["a", 3], "ner_tags": ["O", "O"]}], r"data\[1\]: column 'tokens': expected a value like"),
        ([{"tokens": ["\ud800"], "ner_tags": ["O"]}], r"data\[0\]: column 'tokens': .*surrogates not allowed"),
        (
            [{"tokens": ["a"], "ner_tags": [3]}],
            r"data\[0\]: column 'ner_tags': expected a list of strings, .* got \[3\]",
        ),
        ([{"words": ["a"]}], "expected a column 'tokens', got 'words'"),
        ([*ROWS, {"ner_tags": ["a"]}], r"data\[4\]: column 'tokens': expected a list of strings, .* got None"),
    ],
)
def test_wrong_rows_say_where(rows: list[Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        task_of().read(rows)


def aligned(tokenizer: Any, words: list[str], word_labels: list[int]) -> tuple[list[int], list[int]]:
    """Ids and labels by the definition, one word after the other."""
    ids, found = [tokenizer.cls_token_id], [-100]
    for word, label in zip(words, word_labels, strict=True):
        pieces = tokenizer([word], is_split_into_words=True, add_special_tokens=False)["input_ids"]
        ids += pieces
        found += [label, *[-100] * (len(pieces) - 1)][: len(pieces)]
    return [*ids, tokenizer.sep_token_id], [*found, -100]


@pytest.mark.parametrize(
    ("name", "vocabulary", "column"),
    [("wnut17_en/test", "bert-base-uncased", -1), ("uner_zh/test", "bert-base-chinese", 2),
     ("ud_ewt_en/dev", "bert-base-cased", 1)],
)  # fmt: skip
def test_real_sentences_are_those_of_the_definition(shared_data: Path, name: str, vocabulary: str, column: int) -> None:
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / vocabulary)
    file = shared_data / "sequence_labelling" / f"{name}.conll"
    task = TokenClassification(TokenClassificationArguments(label_column=column, max_seq_length=512), tokenizer)
    examples, sentences = task.read(file), read_conll(file, label_column=column)
    assert len(examples) == len(sentences) and task.labels is not None
    for index in range(0, len(sentences), 7):
        words, labels = sentences[index]["tokens"], [task.labels.index(name) for name in sentences[index]["labels"]]
        ids, expected = aligned(tokenizer, words, labels)
        batch = examples.batch(0, np.array([index]))
        assert ids == tokenizer(words, is_split_into_words=True)["input_ids"] == batch.input_ids.tolist()
        assert batch.labels.tolist() == expected


@pytest.mark.parametrize("max_seq_length", [3, 16])
def test_no_word_of_a_real_file_is_lost(shared_data: Path, max_seq_length: int) -> None:
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-uncased")
    task = TokenClassification(TokenClassificationArguments(max_seq_length=max_seq_length), tokenizer)
    examples = task.read(shared_data / "sequence_labelling" / "wnut17_en" / "dev.conll")
    assert examples.lengths(0).max() <= max_seq_length and task.labels is not None
    said = list(task.rows(examples, one_hot(examples.labels["labels"], len(task.labels))))
    wrong = [word for row in said for word, one, other in zip(*row.values(), strict=True) if one != other]
    assert all(tokenizer.tokenize(word) == [] for word in wrong) and len(said) == 1009


def test_lengths_are_those_counted_by_another_tokenizer(shared_data: Path) -> None:
    stored = json.loads((shared_data / "length_distributions" / "ner_wnut17_words.json").read_text())["histogram"]
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-uncased")
    task = TokenClassification(TokenClassificationArguments(), tokenizer)
    examples = task.read(shared_data / "sequence_labelling" / "wnut17_en" / "train.conll")
    assert Counter(examples.lengths(0).tolist()) == {int(length): count for length, count in stored.items()}


def test_a_model_made_for_the_task_learns() -> None:
    torch.set_num_threads(1)
    task = task_of()
    examples = task.read(ENTITIES)
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **task.config(),
    )  # fmt: skip
    model, batch = BertForTokenClassification(config), examples.batch(0, np.arange(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scores = task.metrics(examples, output.logits.detach().numpy(), batch.labels.numpy())
    assert scores == pytest.approx({"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "accuracy": 7 / 8})
