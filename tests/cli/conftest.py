"""Tiny checkpoints and runs for the tests of commands that train, judge and predict."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_fast import BertConfig, BertForMaskedLM, BertTokenizer
from bert_fast.cli import main
from bert_fast.training.observers import Observer

TEXT = "a the film was good bad very not red blue is house who lives in Oslo Paris John Mary ran . ?"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TEXT.split()]


class NoPage(Observer):
    """In place of the page, whose plots take seconds; it has tests of its own."""

    def __init__(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def no_pages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_fast.training.reporting.ReportPage", NoPage)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with its tokenizer: one layer of 32, a masked-LM head."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(path)
    BertTokenizer(VOCABULARY, do_lower_case=False).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.tsv and valid.tsv: sentences that are positive where they hold "good", negative where they hold "bad"."""
    path = tmp_path_factory.mktemp("reviews")
    draw = random.Random(0)
    for name, count in (("train.tsv", 160), ("valid.tsv", 40)):
        rows = []
        for index in range(count):
            words = draw.choices(["a", "the", "film", "was", "very", "red", "house"], k=draw.randint(1, 8))
            words.insert(draw.randint(0, len(words)), "good" if index % 2 else "bad")
            rows.append(f"{' '.join(words)}\t{'positive' if index % 2 else 'negative'}\n")
        (path / name).write_text("sentence\tlabel\n" + "".join(rows))
    return path


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.conll: persons and places."""
    path = tmp_path_factory.mktemp("words")
    draw = random.Random(0)
    tags = {"John": "B-PER", "Mary": "B-PER", "Oslo": "B-LOC", "Paris": "B-LOC"}
    sentences = [[draw.choice([*tags, "lives", "in", "a", "house", "."]) for _ in range(6)] for _ in range(60)]
    text = "\n".join("".join(f"{word}\t{tags.get(word, 'O')}\n" for word in sentence) for sentence in sentences)
    (path / "train.conll").write_text(text)
    return path


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.json, as SQuAD has it; choices.jsonl, as SWAG has them."""
    path = tmp_path_factory.mktemp("questions")
    paragraphs = []
    for index in range(20):
        who, where = ("John", "Mary")[index % 2], ("Oslo", "Paris")[index // 2 % 2]
        context = f"{who} lives in {where} . the house is red ."
        answers = [{"text": who, "answer_start": 0}]
        paragraphs.append({"context": context, "qas": [{"id": f"q{index}", "question": "who ?", "answers": answers}]})
    (path / "train.json").write_text(json.dumps({"version": "1.1", "data": [{"title": "", "paragraphs": paragraphs}]}))
    rows = [
        {"sent1": "the film was good .", "sent2": "John", "label": index % 4}
        | {f"ending{choice}": "ran ." if choice == index % 4 else "is bad ." for choice in range(4)}
        for index in range(20)
    ]
    (path / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def classify_run(tiny_model: Path, reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run on `reviews`."""
    path = tmp_path_factory.mktemp("runs") / "reviews"
    arguments = [
        *("--model", tiny_model, "--train", reviews / "train.tsv", "--valid", reviews / "valid.tsv"),
        *("--text", "sentence", "--output-dir", path, "--steps", "40", "--eval-every", "20"),
        *("--learning-rate", "1e-2", "--quiet"),
    ]
    assert main.main(["finetune", "classify", *map(str, arguments)]) == 0
    return path
