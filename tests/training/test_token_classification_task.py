"""Named entities: metrics by hand, predictions as files, and a run that learns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import BertConfig, BertForTokenClassification
from bert_fast.data.conll import read_conll
from bert_fast.data.token_classification import TokenClassificationSource
from bert_fast.tokenization import BertTokenizer
from bert_fast.training.task import Predictions
from bert_fast.training.tasks.token_classification import TokenClassificationTask

WORDS = ["john", "mary", "lives", "in", "new", "york", "oslo", "."]
NAMES = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
ROWS = [
    {"tokens": ["john", "mary", "lives", "in", "new", "york"],
     "ner_tags": ["B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC"]},
    {"tokens": ["oslo", "\u200b", "."], "ner_tags": ["B-LOC", "I-LOC", "O"]},
]  # fmt: skip


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertTokenizer:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]), encoding="utf-8")
    return BertTokenizer(file)


def said(source: TokenClassificationSource, answers: list[str]) -> Predictions:
    """Predictions that give the words that have a token these labels."""
    labels = np.full(int(source.lengths(0).sum()), NAMES.index("I-PER"))  # other tokens must not matter
    labels[source.word_tokens[source.word_tokens >= 0]] = [source.label_names.index(answer) for answer in answers]
    predictions, lengths = Predictions(source.lengths(0)), source.lengths(0)
    for index in reversed(range(len(source))):
        start = int(lengths[:index].sum())
        predictions.add(np.array([index]), {"labels": labels[start : start + lengths[index]]})
    return predictions


RIGHT = ["B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "B-LOC", "O"]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        # The word of which no token is left is missed: new york is right, oslo ends too early.
        (RIGHT, {"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "accuracy": 8 / 9}),
        # One entity found of three, two wrong ones: john alone, new york as a person.
        (["B-PER", "O", "O", "O", "B-PER", "I-PER", "O", "O"],
         {"precision": 0, "recall": 0, "f1": 0, "accuracy": 4 / 9}),
        # I- without B- begins an entity; I- of another type begins one, too.
        (["I-PER", "I-PER", "O", "O", "I-LOC", "I-LOC", "O", "O"],
         {"precision": 1, "recall": 2 / 3, "f1": 0.8, "accuracy": 5 / 9}),
        (["O"] * 8, {"precision": 0, "recall": 0, "f1": 0, "accuracy": 3 / 9}),
    ],
)  # fmt: skip
def test_metrics_by_hand(tokenizer: BertTokenizer, answers: list[str], expected: dict[str, float]) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer)
    task = TokenClassificationTask(source, source)
    assert task.metric == "f1" and task.higher_is_better
    assert task.score(source, said(source, answers)) == pytest.approx(expected)


def test_other_labels_have_no_entities(tokenizer: BertTokenizer) -> None:
    rows = [{"tokens": ["john", "lives"], "ner_tags": ["NOUN", "VERB"]}]
    source = TokenClassificationSource.read(rows, tokenizer)
    task = TokenClassificationTask(source)
    assert task.metric == "accuracy"
    assert task.score(source, said(source, ["NOUN", "NOUN"])) == {"accuracy": 0.5}


def test_predictions_are_conll_columns(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer)
    task = TokenClassificationTask()
    [file] = task.write_predictions(tmp_path / "predictions" / "valid.v1", source, said(source, RIGHT))
    assert file == tmp_path / "predictions" / "valid.v1.conll"
    assert file.read_text(encoding="utf-8").split("\n")[4:9] == [
        "new\tB-LOC\tB-LOC", "york\tI-LOC\tI-LOC", "", "oslo\tB-LOC\tB-LOC", "\u200b\tI-LOC\tO",
    ]  # fmt: skip
    assert list(task.rows(source, said(source, RIGHT)))[1] == {
        "words": ["oslo", "\u200b", "."], "labels": ["B-LOC", "O", "O"], "gold": ["B-LOC", "I-LOC", "O"],
    }  # fmt: skip
    again = read_conll(file, label_column=2)
    assert again.words == source.sentences.words and len(again) == 2


def test_predictions_without_right_labels(tokenizer: BertTokenizer) -> None:
    rows = [{"tokens": ["john", "a\tb\n"]}]
    source = TokenClassificationSource.read(rows, tokenizer, labels=NAMES, label_column=None)
    task = TokenClassificationTask()
    assert list(task.conll(source, said(source, ["B-PER", "O"]))) == ["john\tB-PER", "a b \tO", ""]
    assert list(task.rows(source, said(source, ["B-PER", "O"]))) == [
        {"words": ["john", "a\tb\n"], "labels": ["B-PER", "O"]}
    ]
    with pytest.raises(ValueError, match="expected examples with labels"):
        task.score(source, said(source, ["B-PER", "O"]))


def test_labels_of_training_and_validation_agree(tokenizer: BertTokenizer) -> None:
    train = TokenClassificationSource.read(ROWS, tokenizer)
    with pytest.raises(ValueError, match="valid: expected the labels of train"):
        TokenClassificationTask(train, TokenClassificationSource.read(ROWS[1:], tokenizer))
    assert TokenClassificationTask(train).model_config() == {"id2label": dict(enumerate(train.label_names))}
    with pytest.raises(ValueError, match="train: expected labelled examples"):
        TokenClassificationTask().model_config()
    with pytest.raises(TypeError, match="expected a TokenClassificationSource, got list"):
        TokenClassificationTask().describe([], 0)  # type: ignore[arg-type]
    assert TokenClassificationTask(train).describe(train, 1) == "[CLS] oslo/B-LOC ./O [SEP]"


def make_model(task: TokenClassificationTask, vocab_size: int) -> BertForTokenClassification:
    torch.set_num_threads(1)
    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    sizes |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForTokenClassification(BertConfig(vocab_size=vocab_size, **sizes, **task.model_config()))


def test_the_loss_of_two_batches_is_that_of_one(tokenizer: BertTokenizer) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer)
    task = TokenClassificationTask(source)
    model = make_model(task, len(tokenizer)).double().eval()
    batches = [source.batch(0, np.array(indices)) for indices in ([0, 1], [0], [1])]
    counts = [task.label_counts(batch)["loss"] for batch in batches]
    assert counts == [8, 6, 2]
    both, first, second = (task.loss_parts(model, batch)["loss"] * n for batch, n in zip(batches, counts, strict=True))
    assert torch.allclose(both, first + second)


def test_a_batch_without_labels_has_no_loss(tokenizer: BertTokenizer) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer, labels=NAMES, label_column=None)
    labelled = TokenClassificationSource.read(ROWS, tokenizer, labels=NAMES)
    task = TokenClassificationTask(None, labelled)
    model, batch = make_model(task, len(tokenizer)).eval(), source.batch(0, np.array([1, 0]))
    parts, answers = task.predict(model, batch)
    assert parts == {} and task.label_counts(batch) == {}
    assert answers["labels"].shape == batch["input_ids"].shape


def test_a_small_model_learns_names_of_real_sentences(shared_data: Path) -> None:
    torch.manual_seed(0)
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-uncased")
    file = shared_data / "sequence_labelling" / "wnut17_en" / "dev.conll"
    source = TokenClassificationSource.read(file, tokenizer)
    task = TokenClassificationTask(source, source)
    model = make_model(task, len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    indices = np.arange(64)
    for _ in range(80):
        task.loss_parts(model, source.batch(0, indices))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    predictions = Predictions(source.lengths(0))
    with torch.no_grad():
        for start in range(0, len(source), 256):
            indices = np.arange(start, min(start + 256, len(source)))
            _, answers = task.predict(model.eval(), source.batch(0, indices))
            predictions.add(indices, {name: value.numpy() for name, value in answers.items()})
    metrics = task.score(source, predictions)
    gold, found = source.true_word_labels(), source.word_labels(predictions.tokens("labels")[0])
    learnt = slice(0, int(source.sentences.boundaries[64]))
    assert gold is not None and (gold[learnt] == found[learnt]).mean() > 0.99
    assert 0 < metrics["f1"] < metrics["accuracy"] < 1
